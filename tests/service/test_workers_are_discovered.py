"""Sources of workers: files, DNS and the merge of what they say; a failing one loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.discovery.config import DiscoveryConfig, DnsConfig
from service.discovery.desired import Known, merge
from service.discovery.dns_names import EMPTY_ANSWERS, DnsSource
from service.discovery.following import Discovery
from service.discovery.source import Snapshot, SourceError
from service.discovery.worker_file import FileSource, read_workers
from service.worker_settings import FleetConfig, WorkerTemplate, worker_config
from tests.clock import run_virtual
from tests.service.watched import configured

Records = dict[str, list[str]]


def urls(snapshot: Snapshot) -> list[str]:
    return [worker_config(entry, FleetConfig()).url for entry in snapshot]


class ScriptedDns(asyncio.DatagramProtocol):
    """A DNS server on loopback that answers from `records`, e.g. {"w.test. A": ["10.0.0.1"]}."""

    def __init__(self) -> None:
        self.records: Records = {}
        self.ttl_s = 0
        self.rcode = dns.rcode.NOERROR
        self.fails_at = ""
        self.questions = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        question = query.question[0]
        fails = dns.rdatatype.to_text(question.rdtype) == self.fails_at
        reply.set_rcode(dns.rcode.SERVFAIL if fails else self.rcode)
        self.questions += 1
        found = self.records.get(f"{question.name} {dns.rdatatype.to_text(question.rdtype)}")
        if found and reply.rcode() == dns.rcode.NOERROR:
            reply.answer.append(
                dns.rrset.from_text(question.name, self.ttl_s, "IN", question.rdtype, *found)
            )
        self.transport.sendto(reply.to_wire(), addr)


@asynccontextmanager
async def scripted_dns() -> AsyncIterator[tuple[ScriptedDns, str]]:
    server = ScriptedDns()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", 0)
    )
    try:
        host, port = transport.get_extra_info("sockname")
        yield server, f"{host}:{port}"
    finally:
        transport.close()


def a_name(nameserver: str, name: str = "w.test.", port: int | None = 8000) -> DnsConfig:
    return DnsConfig(
        name=name, port=port, nameservers=(nameserver,), interval_s=0.05, min_interval_s=0.01
    )


async def test_addresses_of_both_families_are_workers() -> None:
    async with scripted_dns() as (server, address):
        server.records = {"w.test. A": ["10.0.0.2", "10.0.0.1"], "w.test. AAAA": ["fd00::1"]}
        snapshot = await anext(DnsSource(a_name(address)).snapshots())
    assert urls(snapshot) == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
        "http://[fd00::1]:8000",
    ]


async def test_srv_records_bring_their_own_ports() -> None:
    async with scripted_dns() as (server, address):
        name = "_http._tcp.w.test."
        server.records = {f"{name} SRV": ["0 1 8001 a.w.test.", "0 1 8002 b.w.test."]}
        snapshot = await anext(DnsSource(a_name(address, name, None)).snapshots())
    assert urls(snapshot) == ["http://a.w.test:8001", "http://b.w.test:8002"]


async def test_a_name_is_asked_again_and_changes_are_seen() -> None:
    async with scripted_dns() as (server, address):
        server.records = {"w.test. A": ["10.0.0.1"]}
        snapshots = DnsSource(a_name(address)).snapshots()
        assert urls(await anext(snapshots)) == ["http://10.0.0.1:8000"]
        server.records = {"w.test. A": ["10.0.0.3"]}
        assert urls(await anext(snapshots)) == ["http://10.0.0.3:8000"]


async def test_an_empty_answer_is_believed_only_when_it_is_repeated() -> None:
    async with scripted_dns() as (_, address):
        source = DnsSource(a_name(address))
        for _ in range(EMPTY_ANSWERS - 1):
            with pytest.raises(SourceError, match="no records"):
                await anext(source.snapshots())
        assert await anext(source.snapshots()) == ()


async def test_a_server_that_fails_is_a_failure_not_an_empty_answer() -> None:
    async with scripted_dns() as (server, address):
        server.rcode = dns.rcode.SERVFAIL
        source = DnsSource(a_name(address))
        for _ in range(EMPTY_ANSWERS + 2):
            with pytest.raises(SourceError, match="cannot resolve"):
                await anext(source.snapshots())


async def test_a_family_that_a_name_never_had_may_fail_one_that_it_had_may_not() -> None:
    async with scripted_dns() as (server, address):
        server.records = {"w.test. A": ["10.0.0.1"], "w.test. AAAA": ["fd00::1"]}
        server.fails_at = "AAAA"
        source = DnsSource(a_name(address))
        assert urls(await anext(source.snapshots())) == ["http://10.0.0.1:8000"]
        server.fails_at = ""
        assert len(await anext(source.snapshots())) == 2
        server.fails_at = "AAAA"
        with pytest.raises(SourceError, match="cannot resolve"):
            await anext(source.snapshots())


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_lists_workers_like_the_settings_do(tmp_path: Path) -> None:
    file = write(
        tmp_path / "w.yaml", "- http://a:1\n- {url: http://b:2, id: big, batch_limit: 4}\n"
    )
    workers = [worker_config(entry, FleetConfig()) for entry in read_workers(file)]
    assert [(one.worker_id, one.batch_limit) for one in workers] == [("a:1", 256), ("big", 4)]
    nested = write(tmp_path / "n.yaml", "workers: [http://a:1]\n")
    assert read_workers(nested) == ("http://a:1",)
    assert read_workers(write(tmp_path / "e.yaml", "")) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- http://a:1\n- {url: http://b:2, batch: 4}\n", ("w.yaml:2:", "batch", "batch_limit")),
        ("- {url: http://b:2}\n- [\n", ("w.yaml:", "YAML")),
        ("just words", ("w.yaml",)),
        ("- http://a:1\n- {url: http://b:2, id: 2001-99-99}", ("w.yaml:2", "timestamp")),
        ("- http://a:1\n- http://a:1\n", ("w.yaml", "http://a:1", "twice")),
        ("- {url: http://a:1, id: x}\n- {url: http://a:2, id: x}\n", ("w.yaml", "x", "twice")),
    ],
)
def test_a_bad_file_of_workers_says_where(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SourceError) as refused:
        read_workers(write(tmp_path / "w.yaml", text))
    assert all(word in str(refused.value) for word in words)
    assert "\n" not in str(refused.value)


async def test_a_file_is_followed_as_it_changes(tmp_path: Path) -> None:
    file = write(tmp_path / "w.yaml", "- http://a:1\n")
    snapshots = FileSource(file, interval_s=0.01).snapshots()
    assert await anext(snapshots) == ("http://a:1",)
    write(tmp_path / "new.yaml", "- http://b:2\n").rename(file)
    assert await anext(snapshots) == ("http://b:2",)
    file.unlink()
    with pytest.raises(SourceError, match=r"cannot read .*w\.yaml"):
        await anext(snapshots)


def test_new_settings_leave_the_sources_alone_that_they_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    kept, other = Scripted("file:kept"), Scripted("file:other")
    sources = {"file:kept": (1, kept), "file:other": (1, other)}

    def build(_: DiscoveryConfig) -> dict[str, tuple[object, Scripted]]:
        return dict(sources)

    monkeypatch.setattr("service.discovery.following._sources", build)
    wants: list[list[str]] = []

    async def play() -> None:
        discovery = Discovery(lambda workers: wants.append(sorted(workers)), lambda _: True)
        discovery.configure((), FleetConfig(), DiscoveryConfig())
        task = asyncio.get_running_loop().create_task(discovery.run())
        kept.say.put_nowait(("http://a:1",))
        other.say.put_nowait(("http://b:2",))
        await asyncio.sleep(1.0)
        assert wants[-1] == ["a:1", "b:2"]
        sources.pop("file:other")
        discovery.configure((configured("s"),), FleetConfig(), DiscoveryConfig())
        assert wants[-1] == ["a:1", "s"]
        made.extend(one.label for one in discovery.stats())
        kept.say.put_nowait(("http://c:3",))
        await asyncio.sleep(1.0)
        assert wants[-1] == ["c:3", "s"]
        # What workers have in common concerns every source: they are asked anew.
        discovery.configure((), FleetConfig(max_num_seqs=3), DiscoveryConfig())
        kept.say.put_nowait(("http://d:4",))
        await asyncio.sleep(1.0)
        assert wants[-1] == ["d:4"]
        assert discovery.wanted.workers["d:4"].batch_limit == 3
        task.cancel()

    run_virtual(play())
    assert made == ["file:kept"]


@given(
    st.dictionaries(
        st.sampled_from(["admin", "static", "file:x", "dns:y"]),
        st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("pqrs")), max_size=5),
    ),
    st.sets(st.sampled_from("abcd")),
)
def test_the_first_source_that_names_an_id_or_a_url_has_it(
    said: dict[str, list[tuple[str, str]]], removed: set[str]
) -> None:
    known = {
        source: Known(workers=tuple(configured(name, url=f"http://{host}") for name, host in pairs))
        for source, pairs in said.items()
    }
    wanted = merge(known, removed)
    assert not wanted.workers.keys() & removed
    owners: dict[str, set[str]] = {}
    for worker_id, worker in wanted.workers.items():
        owners.setdefault(worker.url, set()).add(wanted.sources[worker_id])
        assert worker in known[wanted.sources[worker_id]].workers
    assert all(len(sources) == 1 for sources in owners.values())
    assert not removed & set(wanted.left_out)
    every = {worker.worker_id for one in known.values() for worker in one.workers}
    assert every - removed - wanted.workers.keys() <= set(wanted.left_out)
    for source, one in known.items():
        for worker in one.workers:
            if worker.worker_id in removed | wanted.workers.keys():
                continue
            # Left out only for the sake of a URL that an earlier source has.
            assert owners[worker.url] != {source}


class Scripted:
    """A source that says what it is told to, or fails."""

    retry_max_s = 10.0
    trouble = ""

    def __init__(self, label: str) -> None:
        self.label = label
        self.say: asyncio.Queue[Snapshot | SourceError] = asyncio.Queue()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        while True:
            word = await self.say.get()
            if isinstance(word, SourceError):
                raise word
            yield word


def test_a_source_that_fails_keeps_its_workers_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Scripted("file:x")
    monkeypatch.setattr(
        "service.discovery.following._sources", lambda _: {source.label: (None, source)}
    )
    wants: list[list[str]] = []
    up = {"a:1"}

    async def play() -> None:
        discovery = Discovery(lambda workers: wants.append(sorted(workers)), up.__contains__)
        discovery.configure((configured("s"),), FleetConfig(), DiscoveryConfig(keep_s=100.0))
        task = asyncio.get_running_loop().create_task(discovery.run())
        source.say.put_nowait(("http://a:1", "http://b:2"))
        await asyncio.sleep(1.0)
        assert wants[-1] == ["a:1", "b:2", "s"]
        source.say.put_nowait(SourceError("gone"))
        await asyncio.sleep(50.0)
        assert wants[-1] == ["a:1", "b:2", "s"]
        (stats,) = discovery.stats()
        assert (stats.failing, stats.failures, stats.workers) == (True, 1, 2)
        await asyncio.sleep(60.0)
        source.say.put_nowait(SourceError("gone"))
        await asyncio.sleep(1.0)
        # b does not answer either; a may well be alive.
        assert wants[-1] == ["a:1", "s"]
        await asyncio.sleep(20.0)
        source.say.put_nowait(("http://b:2",))
        await asyncio.sleep(1.0)
        assert wants[-1] == ["b:2", "s"]
        assert not discovery.stats()[0].failing
        source.say.put_nowait(("ftp://b:2",))
        await asyncio.sleep(20.0)
        assert wants[-1] == ["b:2", "s"]
        task.cancel()

    run_virtual(play())


def test_a_templates_values_are_those_of_every_worker_of_the_source() -> None:
    template = WorkerTemplate(batch_limit=3, models=("m",))
    source = DnsSource(DnsConfig(name="w", port=1, worker=template))
    (entry,) = source._entries((("10.0.0.1", 1),))
    worker = worker_config(entry, FleetConfig())
    assert (worker.batch_limit, worker.models) == (3, frozenset({"m"}))
