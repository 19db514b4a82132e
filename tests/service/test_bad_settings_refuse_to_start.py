"""Flags win over the environment, the environment over the file; mistakes are one line, exit 2."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from pydantic import ValidationError

from service.cli import FLAG_ALIASES, run
from service.control.config import PolicyName
from service.settings import Settings, setting_names
from service.settings_text import describe


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def config_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, object]]:
    """What check-config says the settings are."""
    if not any(flag in flags for flag in ("--workers", "--mock", "--config")):
        flags = (*flags, "--workers", "http://a:8000")
    with pytest.raises(SystemExit) as stopped:
        run(["check-config", *flags])
    assert stopped.value.code in (0, None)
    config: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return config


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    (line,) = complaints(capsys, *arguments)
    return line


def complaints(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that mistakes are answered with."""
    with pytest.raises(SystemExit) as stopped:
        run(list(arguments))
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("bidgate: ") for line in lines)
    return lines


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file_over_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(
        tmp_path / "b.yaml",
        "workers: [http://w:1]\n"
        "control: {queue_max: 1, max_wait_s: 1, age_bound_s: 1, weights: {ttft: 1.5}}\n",
    )
    monkeypatch.setenv("BIDGATE_CONTROL__QUEUE_MAX", "2")
    monkeypatch.setenv("BIDGATE_CONTROL__MAX_WAIT_S", "2")
    control = config_of(capsys, "--config", file, "--queue-max", "3")["control"]
    assert (control["queue_max"], control["max_wait_s"], control["age_bound_s"]) == (3, 2.0, 1.0)
    assert control["seed"] == 0
    assert control["weights"]["ttft"] == 1.5  # type: ignore[index]


def test_the_environment_may_name_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "b.yaml", "workers: [http://w:1]\nserver: {port: 9}\n")
    monkeypatch.setenv("BIDGATE_CONFIG", file)
    assert config_of(capsys, "--host", "::1")["server"]["port"] == 9


def test_several_workers_follow_one_flag() -> None:
    settings = Settings(workers=("http://a:1", "http://b:2/v1/"))  # type: ignore[arg-type]
    workers = settings.worker_configs()
    assert [worker.url for worker in workers] == ["http://a:1", "http://b:2"]
    assert [worker.worker_id for worker in workers] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--workers", "http://a:1", "http://b:2", "--port", "1"),
        ("--static-backends", "http://a:1,http://b:2"),
        ("--worker-urls", "http://a:1", "http://b:2"),
    ],
)
def test_workers_may_be_given_in_any_routers_way(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        run(["check-config", *flags])
    assert yaml.safe_load(capsys.readouterr().out)["workers"] == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize("value", ["http://a:1,http://b:2", '["http://a:1", "http://b:2"]'])
def test_workers_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("BIDGATE_WORKERS", value)
    assert config_of(capsys, "--mock", "0")["workers"] == ["http://a:1", "http://b:2"]


def test_each_worker_may_differ_from_the_fleet(tmp_path: Path) -> None:
    file = write(
        tmp_path / "b.yaml",
        "fleet: {max_num_seqs: 64, worker_api_key: shared}\n"
        "workers:\n"
        "- http://a:1\n"
        "- {url: http://b:2, id: big, batch_limit: 128, kv_capacity_tokens: 9,"
        " models: [m], api_key: own}\n",
    )
    plain, big = Settings(config=file).worker_configs()  # type: ignore[arg-type]
    assert (plain.batch_limit, plain.api_key, plain.models) == (64, "shared", None)
    assert (big.worker_id, big.batch_limit, big.api_key) == ("big", 128, "own")
    assert (big.kv_capacity_tokens, big.models) == (9, frozenset({"m"}))


def test_what_check_config_prints_can_be_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = config_of(capsys, "--queue-max", "7", "--prices.steps", "2", "--mock", "3")
    file = write(tmp_path / "b.yaml", yaml.safe_dump(first))
    assert config_of(capsys, "--config", file) == first


def test_secrets_are_masked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIDGATE_WORKERS", '[{"url": "http://a:1", "api_key": "s3cret-1"}]')
    with pytest.raises(SystemExit):
        run(["check-config", "--api-key", "s3cret-2", "--worker-api-key", "s3cret-3"])
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert printed.count("**********") == 3
    assert "s3cret" not in repr(Settings().worker_configs())


@pytest.mark.parametrize("alias", FLAG_ALIASES)
def test_other_routers_flags_are_ours_by_another_name(
    capsys: pytest.CaptureFixture[str], alias: str
) -> None:
    pair = {"--prefill-workers": "--decode-workers", "--decode-workers": "--prefill-workers"}
    ours = FLAG_ALIASES[alias]
    values = {
        "--workers": "http://a:1",
        "--policy": "roundrobin",
        **dict.fromkeys(pair, "http://p"),
    }
    value = values.get(ours, "7")
    # Half a pair is refused.
    others = ("--mock", "1", *((pair[ours], "http://d") if ours in pair else ()))
    assert config_of(capsys, alias, value, *others) == config_of(
        capsys, ours, value.replace("roundr", "round_r"), *others
    )


def test_workers_of_a_pair_are_given_by_flags_or_by_their_role(tmp_path: Path) -> None:
    flags = Settings(prefill_workers="http://p:1,http://p:2", decode_workers=("http://d:1",))  # type: ignore[arg-type]
    file = write(
        tmp_path / "b.yaml",
        "workers:\n- {url: http://p:1, role: prefill}\n- {url: http://p:2, role: prefill}\n"
        "- {url: http://d:1, role: decode}\n",
    )
    assert Settings(config=file).worker_configs() == flags.worker_configs()  # type: ignore[arg-type]
    assert [worker.role.value for worker in flags.worker_configs()] == [
        "prefill",
        "prefill",
        "decode",
    ]


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_half_a_pair_is_refused(capsys: pytest.CaptureFixture[str], role: str, other: str) -> None:
    line = complaint(capsys, "serve", f"--{role}-workers", "http://a:1")
    assert f"no {other} workers" in line
    assert f"--{other}-workers" in line


def test_a_hold_longer_than_the_lease_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "serve", "--mock", "1", "--handoff.hold-s", "30")
    assert "hold_s must be below lease_s" in line


@pytest.mark.parametrize("policy", list(PolicyName))
def test_choices_may_have_the_dashes_that_help_prints(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: PolicyName,
) -> None:
    dashed = policy.value.replace("_", "-")
    assert config_of(capsys, "--policy", dashed)["control"]["policy"] == policy.value
    assert config_of(capsys, "--policy", policy.value)["control"]["policy"] == policy.value
    monkeypatch.setenv("BIDGATE_CONTROL__POLICY", dashed)
    assert config_of(capsys)["control"]["policy"] == policy.value
    monkeypatch.delenv("BIDGATE_CONTROL__POLICY")
    file = write(tmp_path / "b.yaml", f"workers: [http://a:1]\ncontrol: {{policy: {dashed}}}\n")
    assert config_of(capsys, "--config", file)["control"]["policy"] == policy.value


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "serve", "--quue-max", "3")
    assert "--quue-max" in line
    assert "--queue-max" in line


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("BIDGATE_CONTROL__QUEU_MAX", "BIDGATE_CONTROL__QUEUE_MAX"),
        ("BIDGATE_SERVR__PORT", "BIDGATE_SERVER__PORT"),
        ("BIDGATE_WORKRS", "BIDGATE_WORKERS"),
        ("BIDGATE_CONTROL__WEIGHTS__TFTF", "BIDGATE_CONTROL__WEIGHTS__TTFT"),
    ],
)
def test_an_unknown_variable_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    nearest: str,
) -> None:
    monkeypatch.setenv(variable, "1")
    line = complaint(capsys, "serve", "--mock", "1")
    assert variable in line
    assert nearest in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servr: {port: 1}", ("servr", "server")),
        ("server: {prot: 1}", ("server.prot", "server.port")),
        ("prot: 1", ("setting prot;", "server.port")),
        ("max_wait: 1", ("setting max_wait;", "control.max_wait_s")),
        ("control: {weights: {tftt: 1}}", ("control.weights.tftt", "control.weights.ttft")),
        ("control: {wights: {ttft: 1}}", ("control.wights", "control.weights?")),
        ("workers: [{url: 'http://a', batch: 1}]", ("workers.0.batch;", "workers.batch_limit")),
        ("server: {port: [1]}", ("server.port",)),
        ("server: {port: 99999}", ("server", "65535")),
        ("control: {policy: best}", ("control.policy", "online_lp")),
        ("workers: [{url: 'http://a', batch_limit: 0}]", ("batch_limit", "0")),
        ("workers: [{url: 'http://a', kv_capacity_tokens: 0}]", ("kv_capacity_tokens", "0")),
        ("a: [", ("YAML",)),
        ("edge: {api_key: 2001-99-99}", ("b.yaml:1", "timestamp", "quote")),
        ("server:\n  port: 0x_", ("b.yaml:2", "int")),
        ("a: !!timestamp x", ("b.yaml:1", "timestamp")),
        ("server: {port: " + "9" * 5000 + "}", ("b.yaml:1", "int")),
        ("workers: [{url: 'http://a', id: \"a\\r\\nb\"}]", ("id", "printable")),
        ("workers: [{url: 'http://a', id: caf\u00e9}]", ("id", "printable")),
        ("workers: [{url: 'http://a', id: a b}]", ("id", "blanks")),
        ("workers: [{url: 'http://a', id: '" + "x" * 600 + "'}]", ("id", "512")),
        ("workers: [{url: 'http://a', api_key: \"k\\r\\nx: y\"}]", ("api_key", "printable")),
        ("workers: ['http://a?b=c']", ("url", "a?b=c")),
        ("workers: [a:1]", ("b.yaml:1: workers: ", "http(s)://", "a:1")),
        ("workers:\n  - http://b:1\n  - a:1", ("b.yaml:3: workers: ", "a:1")),
        ("workers:\n  - http://b:1\n  - {url: a:1}", ("b.yaml:3: workers: ", "a:1")),
        ("workers:\n  - http://b:1\n  - id: x\n    url: a:1", ("b.yaml:3: workers: ", "a:1")),
        ("server: {}\nworkers: 'http://b:1 a:1'", ("b.yaml:2: workers: ", "a:1")),
        ("workers: [http://169.254.169.254]", ("b.yaml:1: workers: ", "169.254.169.254")),
        ("workers:\n  - http://a:1\n  - http://a:1", ("b.yaml:3: workers: ", "twice")),
        ("server: {}\nprefill_workers: [a:1]", ("b.yaml:2: prefill_workers: ", "a:1")),
        ("workers: [http://b:1]\ndecode_workers: [a:1]", ("b.yaml:2: decode_workers: ", "a:1")),
        ("workers: ['http://a#b']", ("url", "a#b")),
        ("workers: ['http://caf\u00e9:1']", ("url",)),
        ("auth: {keys: [{key: k}, {key: l}, {key: k}]}", ("entry 3", "entry 1")),
        ("auth: {keys: [{key: k}]}\nedge: {api_key: k}", ("entry 2", "entry 1")),
        ("- 1", ("mapping",)),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    file = write(tmp_path / "b.yaml", text)
    line = complaint(capsys, "serve", "--mock", "1", "--config", file)
    assert all(word in line for word in words)


def test_every_mistake_has_its_line_unknown_names_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "server:\n  port: x\n  prot: 1\ncontrol:\n  policy: best\nworkers:\n- {urll: a}\n"
    file = write(tmp_path / "b.yaml", text)
    lines = complaints(capsys, "serve", "--config", file)
    assert [line.removeprefix(f"bidgate: {file}:").split(",")[0] for line in lines] == [
        "7: unknown setting workers.0.urll; did you mean workers.url?",
        "3: unknown setting server.prot; did you mean server.port?",
        "7: workers.0.url: field required",
        "2: server.port: input should be a valid integer",
        "5: control.policy: input should be 'online_lp'",
    ]


def test_every_bad_worker_and_every_unknown_variable_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = complaints(capsys, "serve", "--workers", "a:1", "http://b:1", "c:1", "http://b:1")
    assert len(lines) == 3
    assert all(word in line for word, line in zip(("a:1", "c:1", "b:1"), lines, strict=True))
    monkeypatch.setenv("BIDGATE_SERVR__PORT", "1")
    monkeypatch.setenv("BIDGATE_WORKRS", "1")
    assert len(complaints(capsys, "serve", "--mock", "1")) == 2


def test_ten_mistakes_are_told_and_the_others_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = complaints(capsys, "serve", "--workers", *(f"a:{n}" for n in range(14)))
    assert len(lines) == 11
    assert lines[-1] == "bidgate: and 4 more mistakes"


def test_a_workers_mistake_in_a_flag_is_not_blamed_on_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write(tmp_path / "b.yaml", "workers: [http://b:1]")
    line = complaint(capsys, "check-config", "--config", file, "--workers", "a:1")
    assert "b.yaml" not in line
    assert "a:1" in line


def numbers_in(group: object, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings that take any real number."""
    hints = get_type_hints(type(group))
    for spec in dataclasses.fields(group):  # type: ignore[arg-type]
        value = getattr(group, spec.name)
        if dataclasses.is_dataclass(value):
            yield from numbers_in(value, f"{prefix}{spec.name}.")
        elif hints[spec.name] in (float, float | None):
            yield f"{prefix}{spec.name}"


NUMBERS = [
    name
    for group, info in Settings.model_fields.items()
    if dataclasses.is_dataclass(info.default)
    for name in numbers_in(info.default, f"{group}.")
]


def test_what_is_no_number_is_refused_wherever_a_number_is_meant() -> None:
    assert len(NUMBERS) > 30
    for name in NUMBERS:
        for bad in (math.nan, math.inf):
            value: object = bad
            for part in reversed(name.split(".")):
                value = {part: value}
            with pytest.raises(ValidationError) as refused:
                Settings(**value)  # type: ignore[arg-type]
            assert any(name in line for line in describe(refused.value))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mock", "1", "--port", "x"), ("server.port", "'x'")),
        (("--mock", "1", "--port", "70000"), ("port", "70000")),
        (("--mock", "1", "--host", ""), ("host", "0.0.0.0")),
        (("--mock", "99"), ("workers", "0..64")),
        (("--mock", "1", "--mock-profile", "h300"), ("profile", "h300")),
        (("--mock", "1", "--policy", "best"), ("policy", "best")),
        (("--mock", "1", "--weights.ttft=-1"), ("weights.ttft", "-1")),
        (("--mock", "1", "--retries-max=-1"), ("retries_max", "-1")),
        (("--mock", "1", "--stall-timeout-s", "0"), ("stall_timeout_s",)),
        (("--mock", "1", "--bucket-iterations", "0"), ("bucket_iterations", "0")),
        (("--mock", "1", "--queue-max=-1"), ("queue_max", "-1")),
        (("--mock", "1", "--prices.steps", "0"), ("prices", "steps", "0")),
        (("--mock", "1", "--age-memory-s", "0"), ("age_memory_s", "0")),
        (("--mock", "1", "--metrics-timeout-s", "0"), ("metrics_timeout_s",)),
        (("--mock", "1", "--config", "/nope.yaml"), ("/nope.yaml",)),
        ((), ("--workers", "--mock")),
        (("--workers", "ftp://a"), ("ftp://a",)),
        (("--workers", "http://a:1", "http://a:1"), ("a:1", "twice")),
        (("--workers",), ("--workers",)),
        (("http://a:1",), ("http://a:1", "--workers URL")),
        (("--workers", "http://a:99999"), ("http://a:99999", "0-65535")),
        (("--workers", "http://"), ("http://", "its host is missing")),
        (("--workers", "http:///v1/"), ("http://", "its host is missing")),
        (("--workers", "http://a:0"), ("http://a:0", "its port is 0")),
    ],
)
def test_a_value_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = complaint(capsys, "check-config", *flags)
    assert all(word in line for word in words)


def test_credentials_in_a_url_are_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = complaint(capsys, "check-config", "--workers", "http://me:s3cret@a:1")
    assert "api_key" in line
    assert "s3cret" not in line


def test_a_wrong_secret_is_not_repeated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path / "b.yaml", "edge: {api_key: [s3cret]}")
    assert "s3cret" not in complaint(capsys, "serve", "--mock", "1", "--config", file)


def test_help_lists_every_setting_with_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    shown = capsys.readouterr().out
    for name in setting_names():
        if name.startswith("workers."):
            continue
        flag = name.rpartition(".")[2].replace("_", "-")
        assert re.search(rf"--(\w+[.-])*{flag}\b|--mock\b", shown), name
    for group in ("Workers", "Mock workers", "Server", "Requests", "Relaying", "Decision"):
        assert f"─ {group} ─" in shown


def test_every_setting_says_what_it_is() -> None:
    for info in Settings.model_fields.values():
        default = info.default
        if not dataclasses.is_dataclass(default):
            assert info.description
            continue
        words = type(default).__doc__ or ""
        for spec in dataclasses.fields(default):
            assert f"        {spec.name}: " in words, f"{type(default).__name__}.{spec.name}"
