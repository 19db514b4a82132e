"""Every trace format gives the same record; a malformed row names its file and line."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loadgen.trace_errors import TraceError
from loadgen.trace_record import TraceRequest
from loadgen.traces import open_trace

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"
CHAT = [
    {"role": "user", "content": "what is a shadow price"},
    {"role": "assistant", "content": "the value of one more unit"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "welcome"},
]


def write(path: Path, text: str) -> Path:
    """Write a text file, packed when its name ends in .gz."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def read(spec: object, limit: int = 100) -> list[TraceRequest]:
    """Open a trace and take its first requests."""
    return list(islice(open_trace(str(spec)).read(0), limit))


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_plain_csv_is_read_packed_or_not(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path / name,
        "arrival_s,prompt_tokens,output_tokens,tenant,value,ttft_bound_s\n"
        "0.5,10,20,acme,2,0.3\n1.5,11,21,,,\n",
    )
    assert open_trace(str(path)).timed
    assert read(path) == [
        TraceRequest(0.5, 10, 20, tenant="acme", value=2.0, ttft_bound_s=0.3),
        TraceRequest(1.5, 11, 21),
    ]


def test_csv_without_times_is_a_source_of_lengths_only(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "prompt_tokens,decode_tokens\n3,4\n")
    assert not open_trace(str(path)).timed
    assert read(path) == [TraceRequest(0.0, 3, 4)]


def test_azure_times_become_seconds_with_their_last_digit_cut(tmp_path: Path) -> None:
    path = write(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    first, second = read(path)
    assert (first.prompt_tokens, first.decode_tokens) == (374, 44)
    assert second.arrival_s - first.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_burstgpt_passes_over_failed_calls_and_pools_by_model(tmp_path: Path) -> None:
    path = write(
        tmp_path / "b.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
    )
    assert read(path) == [
        TraceRequest(5.0, 472, 18, group="ChatGPT"),
        TraceRequest(118.0, 417, 276, group="GPT-4"),
    ]


@pytest.mark.parametrize("form", ["mooncake", "timed_trace"])
def test_timed_jsonl_keeps_block_ids_and_counts_milliseconds(tmp_path: Path, form: str) -> None:
    line = {"timestamp": 250, "input_length": 48, "output_length": 9, "hash_ids": [0, 1, 2]}
    path = write(tmp_path / "t.jsonl", json.dumps(line) + "\n\n")
    expected = [TraceRequest(0.25, 48, 9, hash_ids=(0, 1, 2))]
    assert read(f"{form}:{path}") == expected
    assert read(path) == expected


def test_plain_jsonl_takes_the_records_own_field_names(tmp_path: Path) -> None:
    line = {"arrival_s": 1, "prompt_tokens": 5, "decode_tokens": 6, "decode_tokens_hint": 7}
    path = write(tmp_path / "t.jsonl", json.dumps(line) + "\n")
    assert read(path) == [TraceRequest(1.0, 5, 6, decode_tokens_hint=7)]


# 5 and 6 words: ceil(5 * 1.36) = 7 and ceil(6 * 1.5) = 9
FIRST_EXCHANGE = TraceRequest(0.0, 7, 9, group="vicuna")


def test_lmsys_parquet_file_and_directory_give_first_exchanges(tmp_path: Path) -> None:
    rows = [
        {"conversation_id": "a", "model": "vicuna", "conversation": CHAT, "language": "English"}
    ]
    for shard in range(2):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-0000{shard}.parquet")
    assert read(tmp_path) == [FIRST_EXCHANGE] * 2
    assert read(tmp_path / "train-00000.parquet") == [FIRST_EXCHANGE]


def test_lmsys_jsonl_gives_first_exchanges(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", json.dumps({"model": "vicuna", "conversation": CHAT}) + "\n")
    assert read(path) == [FIRST_EXCHANGE]


def test_sharegpt_passes_over_conversations_without_an_answer(tmp_path: Path) -> None:
    turns = [
        {"from": "human" if message["role"] == "user" else "gpt", "value": message["content"]}
        for message in CHAT
    ]
    records = [
        {"id": "1", "conversations": turns},
        {"id": "2", "conversations": turns[:1]},
        {"id": "3", "conversations": []},
    ]
    path = write(tmp_path / "sg.json", json.dumps(records))
    assert read(path) == [TraceRequest(0.0, 7, 9)]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.csv", "prompt_tokens,output_tokens\n1,2\n3,many\n", "a.csv:3: "),
        ("b.csv", "arrival_s,prompt_tokens,output_tokens\n1,2\n", "b.csv:2: "),
        ("c.csv", "arrival_s,prompt_tokens,output_tokens\n-1,2,3\n", "c.csv:2: "),
        ("d.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "d.csv:2: "),
        (
            "e.jsonl",
            '{"timestamp":1,"input_length":1,"output_length":1}\n{"timest\n',
            "e.jsonl:2: ",
        ),
        ("f.jsonl", '{"timestamp":1,"input_length":"x","output_length":1}\n', "f.jsonl:1: "),
        ("g.jsonl", '{"prompt_tokens":1,"decode_tokens":1,"decode_token_hint":1}\n', "g.jsonl:1: "),
        ("h.json", '[{"conversations": []}, {"conversations": 3}]', "h.json: item 2: "),
        ("i.json", '[{"conversations": []}, {"conv', "i.json: item 2: "),
        ("j.jsonl", '{"conversation": [{"role": "user"}]}\n', "j.jsonl:1: "),
        (
            "m.csv",
            "Timestamp,Model,Request tokens,Response tokens\n1,ChatGPT,5,6\nx,ChatGPT,5,6\n",
            "m.csv:3: ",
        ),
        ("n.jsonl", '{"timestamp":1,"input_length":1,"hash_ids":[]}\n', "n.jsonl:1: "),
        (
            "o.jsonl",
            '{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":["a"]}\n',
            "o.jsonl:1: ",
        ),
        ("k.csv", "prompt,answer\n1,2\n", "k.csv: not a csv trace: no column 'prompt_tokens'"),
        ("l.csv", "", "l.csv: the file is empty"),
    ],
)
def test_a_malformed_row_is_one_sentence_with_file_and_line(
    tmp_path: Path, name: str, text: str, place: str
) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_parquet_row_is_named_by_shard_and_row(tmp_path: Path) -> None:
    rows = [{"conversation": CHAT}, {"conversation": [{"role": None, "content": "x"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    with pytest.raises(TraceError, match=r"train-0\.parquet: row 2: a message has no role"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "b.jsonl", "c.json", "d.parquet", "e.csv.gz"])
def test_a_file_of_other_bytes_is_one_sentence_with_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    garbage = b"\x00\xff\xfe\x80 no trace\n" * 3
    path.write_bytes(gzip.compress(garbage) if name.endswith(".gz") else garbage)
    with pytest.raises(TraceError, match=name):
        read(path)


@pytest.mark.parametrize("spec", ["nowhere.csv", "fixed:3", "fixed:0x4", "parquet:x"])
def test_a_name_that_is_no_trace_is_refused(spec: str) -> None:
    with pytest.raises(TraceError):
        open_trace(spec)


def test_fixed_lengths_repeat_without_end() -> None:
    assert read("fixed:128x64", limit=3) == [TraceRequest(0.0, 128, 64)] * 3


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the optional data folder is not there")
@pytest.mark.parametrize(
    ("name", "rows"), [("azure2023_code.csv.gz", 8819), ("mooncake_synthetic.csv.gz", 3993)]
)
def test_recorded_data_sets_are_read_whole(name: str, rows: int) -> None:
    assert len(read(SHARED_DATA / name, limit=10**6)) == rows
