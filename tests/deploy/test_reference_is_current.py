"""Files that say something about settings and metrics say what the code says."""

from __future__ import annotations

import yaml

from scripts import reference
from service.settings import Settings, setting_names


def test_written_files_are_what_make_reference_writes() -> None:
    outdated = [
        path.relative_to(reference.ROOT).as_posix()
        for path, text in reference.outputs().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not outdated, f"run `make reference`: {', '.join(outdated)}"


def test_the_settings_file_holds_every_setting_at_its_default() -> None:
    values = yaml.safe_load(reference.SETTINGS_FILE.read_text(encoding="utf-8"))
    assert Settings.model_validate(values) == Settings()
    names = {name for name in setting_names() if not name.startswith(("config", "workers."))}
    assert set(_leaves(values)) == names


def test_the_example_of_a_worker_in_the_settings_file_is_read() -> None:
    text = reference.settings_file()
    example = text.partition("workers: []\n")[2].partition("\n\n")[0]
    lines = [line.removeprefix("#") for line in example.splitlines()]
    workers = yaml.safe_load("\n".join(lines))
    settings = Settings.model_validate({"workers": workers})
    assert [worker.worker_id for worker in settings.worker_configs()] == [
        "10.0.0.7:8000",
        "10.0.0.8:8000",
    ]


def test_every_setting_and_metric_is_explained() -> None:
    assert all(setting.about for setting in reference.settings())
    assert all(one.about for one in reference.series())


def _leaves(values: dict[str, object], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            names += _leaves(value, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names
