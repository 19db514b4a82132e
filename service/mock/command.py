"""The command `bidgate mock-worker`: one mock worker as a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from service.listener import listen
from service.mock.profiles import LLAMA_3_8B_A100, PROFILES
from service.mock.serving import MockHttpServer
from service.mock.worker import MockServer
from service.mock.worker_config import MockWorkerConfig


@dataclass(frozen=True, kw_only=True)
class MockWorkerOptions:
    """Flags of the command; names are vLLM's where vLLM has them.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        model: name served.
        profile: whose iteration times it has.
        max_num_seqs: most requests in the batch.
        kv_tokens: tokens the KV cache holds; the profile's when left out.
        block_size: tokens of a KV block.
        max_model_len: longest prompt and output together; 32768 or the KV cache when left out.
        max_num_queued_reqs: most requests in the worker's own queue.
        time_scale: above 1 it runs faster than real time.
        seed: of output lengths that no request fixes.
        data_parallel_size: engines behind the server, each with the sizes above.
        kv_transfer: passes prompts on to other mock workers, and fetches theirs.
        kv_lease_s: how long it keeps a prompt that nobody fetches.
        enable_prefix_caching: prompts that begin alike are computed once, while memory lasts.
        decode_only: prompts cost nothing here, as behind a prefill worker.
        log_level: of the HTTP server.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "mock"
    profile: str = LLAMA_3_8B_A100.name
    max_num_seqs: int = 256
    kv_tokens: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_queued_reqs: int = 10_000
    time_scale: float = 1.0
    seed: int = 0
    data_parallel_size: int = 1
    kv_transfer: bool = False
    kv_lease_s: float = 30.0
    enable_prefix_caching: bool = False
    decode_only: bool = False
    log_level: str = "info"

    def config(self) -> MockWorkerConfig:
        """Return the worker's settings.

        Raises:
            ValueError: the profile is unknown, or no worker can have these sizes.
        """
        if self.profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ValueError(f"no profile {self.profile!r}; known: {known}")
        return MockWorkerConfig(
            model=self.model,
            profile=PROFILES[self.profile],
            batch_limit=self.max_num_seqs,
            kv_capacity_tokens=self.kv_tokens,
            block_tokens=self.block_size,
            context_tokens=self.max_model_len,
            queue_max=self.max_num_queued_reqs,
            prefill=not self.decode_only,
            kv_transfer=self.kv_transfer,
            kv_lease_s=self.kv_lease_s,
            prefix_caching=self.enable_prefix_caching,
            data_parallel_size=self.data_parallel_size,
            time_scale=self.time_scale,
            seed=self.seed,
        )


def _check(_: object, options: MockWorkerOptions | None) -> None:
    if options is not None:
        options.config()


def mock_worker(
    *, options: Annotated[MockWorkerOptions | None, Parameter(name="*", validator=_check)] = None
) -> None:
    """Run a server that looks like vLLM around a model of its decode iterations.

    Requests take as long as they would on the profile's GPU. A body may carry mock_decode_tokens,
    the output length the model would choose; else it is max_tokens with ignore_eos, else drawn.
    """
    options = options or MockWorkerOptions()
    server = MockHttpServer(
        MockServer(options.config()),
        host=options.host,
        port=options.port,
        log_level=options.log_level,
    )
    # Tried beforehand: uvicorn tells of a taken port between lines of its own.
    listen(options.host, options.port).close()
    server.run()
