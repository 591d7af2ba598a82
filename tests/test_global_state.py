"""That a test cannot leave anything behind for the next one."""

import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from tests.global_state import restored


def test_process_settings_come_back(tmp_path: Path) -> None:
    os.environ["KEPT_BY_TEST"] = "before"
    here, handler = Path.cwd(), signal.getsignal(signal.SIGTERM)
    with restored():
        os.environ["KEPT_BY_TEST"] = "changed"
        os.environ["ADDED_BY_TEST"] = "1"
        os.chdir(tmp_path)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert os.environ["KEPT_BY_TEST"] == "before"
    assert "ADDED_BY_TEST" not in os.environ
    assert Path.cwd() == here
    assert signal.getsignal(signal.SIGTERM) is handler


def test_switches_of_torch_come_back() -> None:
    threads = torch.get_num_threads()
    with restored():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(False)
        torch.backends.cudnn.benchmark = True
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.is_grad_enabled()
    assert not torch.backends.cudnn.benchmark


def test_singletons_are_forgotten() -> None:
    conf = str(Path(__file__).parent.parent / "conf")
    for precision in ("no", "bf16"):  # Accelerate refuses a second precision, Hydra a second initialisation
        with restored():
            Accelerator(cpu=True, mixed_precision=precision)
            initialize_config_dir(conf, version_base="1.3").__enter__()
    assert not GlobalHydra.instance().is_initialized()
