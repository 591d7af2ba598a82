"""Copy a run back from its checkpoint.mirror, unless the folder already has checkpoints or the mirror has none.

python scripts/cluster/restore.py s3://bucket/runs/mine /shared/runs/mine
"""

import shutil
import sys
from pathlib import Path

from fsspec.core import url_to_fs


def restore(url: str, folder: Path) -> str:
    """Copy the files of a mirror to a new folder; return what was done."""
    if (folder / "checkpoints").is_dir():
        return f"{folder} has checkpoints; nothing copied"
    files, root = url_to_fs(url.rstrip("/"))
    names = files.find(root) if files.exists(root) else []
    if not any("/checkpoints/" in name for name in names):
        return f"{url} has no checkpoints; nothing copied"
    if folder.is_dir() and any(folder.iterdir()):
        raise SystemExit(f"error: {folder} is not empty. Remove it, or choose another folder")
    temporary = folder.with_name(f".restoring-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in names:
        target = temporary / name.removeprefix(root).lstrip("/")
        if not target.resolve().is_relative_to(temporary.resolve()):
            raise SystemExit(f"error: {url}: {name} would be copied to another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(name, str(target))
    temporary.rename(folder)
    return f"copied {len(names)} files to {folder}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(restore(sys.argv[1], Path(sys.argv[2]).absolute()))
