"""Generate app/assets from one seed: python -m scripts.make_assets"""
