"""Kernels state their types, so nothing is compiled while somebody waits for a decision."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import getsource, signature
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest

from service.control import kernels
from service.control.kernels import KERNELS, compile_all
from service.control.kernels.compiled import CHECKED, FLOAT, FLOATS, Kernel, kernel


@kernel(FLOAT(FLOATS))
def summed(values: np.ndarray) -> float:
    """Add up."""
    total = 0.0
    for value in values:
        total += value
    return total


def test_a_kernel_gives_what_its_python_gives() -> None:
    values = np.array([1.5, 2.0, -0.25])
    assert summed(values) == summed.plain(values) == 3.25


def test_frozen_and_strided_arrays_are_taken() -> None:
    values = np.arange(6.0)
    values.flags.writeable = False
    assert summed(values[::2]) == 6.0


def test_other_types_are_refused_instead_of_compiled_for() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        summed(np.arange(3))


def test_what_is_no_longer_looked_at_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "checks", False)
    counted = Kernel(summed.plain, FLOAT(FLOATS))
    values = np.array([1.5, 2.0, -0.25])
    assert {counted(values) for _ in range(CHECKED + 2)} == {3.25}
    assert counted(values[::2]) == 1.25
    with pytest.raises(TypeError):
        counted(3.0)
    with pytest.raises(TypeError):
        counted(values.astype(np.float32))


def test_every_kernel_is_compiled_with_the_others() -> None:
    folder = Path(kernels.__file__).parent
    written = sum(path.read_text().count("\n@kernel(") for path in folder.glob("*.py"))
    assert written == len(KERNELS) == len(set(map(id, KERNELS)))
    compile_all()


def test_a_folder_that_cannot_be_written_to_only_costs_time(tmp_path: Path) -> None:
    source = tmp_path / "lonely.py"
    source.write_text(
        "from service.control.kernels.compiled import FLOAT, kernel\n"
        "@kernel(FLOAT(FLOAT))\n"
        "def doubled(value):\n"
        "    return 2.0 * value\n"
        "print(doubled(4.0))\n"
    )
    nowhere = tmp_path / "file"
    nowhere.touch()
    environment = {"PYTHONPATH": ":".join(sys.path), "NUMBA_CACHE_LOCATOR_CLASSES": ""}
    environment |= {"NUMBA_CACHE_DIR": str(nowhere / "cache"), "HOME": str(nowhere)}
    environment |= {"XDG_CACHE_HOME": str(nowhere / "cache")}
    (tmp_path / "__pycache__").touch()
    ran = subprocess.run(
        [sys.executable, str(source)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "8.0\n", ran.stderr


def test_a_kernel_knows_its_description() -> None:
    assert isinstance(summed, Kernel)
    assert all(each.__doc__ for each in KERNELS)


def test_steps_of_one_name_and_signature_are_the_same_in_every_file() -> None:
    """A kernel calls nothing of another file, so some steps stand twice; they must stay alike."""
    seen: dict[tuple[str, str], str] = {}
    shared = set()
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        found = vars(import_module(module.name)).items()
        for name, step in [(name, one) for name, one in found if hasattr(one, "py_func")]:
            key = name, str(signature(step.py_func))
            text = getsource(step.py_func)
            assert seen.setdefault(key, text) == text, key
            shared |= {name} if step.py_func.__module__ != module.name else set()
    assert not shared
    assert "_take" in {name for name, _ in seen}, "steps are found"
