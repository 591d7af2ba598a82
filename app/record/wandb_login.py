"""Whether wandb could log in, found out without importing it: that takes a second."""

import configparser
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_WITHOUT_ACCOUNT = {"offline", "disabled", "dryrun"}
_DEFAULT_SERVER = "https://api.wandb.ai"


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether nothing will be sent, so that no account is needed."""
    return _setting(environment, "WANDB_MODE", "mode") in _WITHOUT_ACCOUNT


def can_log_in(environment: Mapping[str, str]) -> bool:
    """Whether there is anything to log in with, or no need to."""
    if is_offline(environment) or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if _setting(environment, "WANDB_API_KEY", "api_key"):
        return True
    server = _setting(environment, "WANDB_BASE_URL", "base_url") or _DEFAULT_SERVER
    return _has_password(_netrc(environment), urlsplit(server).netloc)


def _setting(environment: Mapping[str, str], variable: str, name: str) -> str | None:
    """From the environment, or from what `wandb offline` and its like have written here or for the user."""
    if variable in environment:
        return environment[variable]
    settings = configparser.ConfigParser(interpolation=None)
    user = Path(environment.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser() / "settings"
    try:
        settings.read([user, Path("wandb/settings")])
    except (configparser.Error, UnicodeDecodeError):
        return None
    return settings.get("default", name, fallback=None)


def _netrc(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("NETRC") or "~/.netrc").expanduser()


def _has_password(path: Path, host: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
