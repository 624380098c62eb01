"""Entry points of the processes that SGLang would start: a rank's scheduler, and the detokenizer."""

from __future__ import annotations

import logging

import setproctitle
import torch

from sglang_pat.cpu import shim

shim.ensure()

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process  # noqa: E402
from sglang.srt.managers.io_struct import BatchEmbeddingOutput, BatchTokenIDOutput  # noqa: E402
from sglang.srt.managers.scheduler import configure_logger  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import PortArgs  # noqa: E402

from sglang_pat.dropped import Dropped, IsolatingDispatcher  # noqa: E402
from sglang_pat.errors import Unsupported, format_one_line  # noqa: E402
from sglang_pat.host import adapter  # noqa: E402
from sglang_pat.host.arguments import AdaptiveServerArgs, make_rank_view  # noqa: E402
from sglang_pat.host.guard import check_overrides  # noqa: E402
from sglang_pat.launch.contract import SGLangMismatch  # noqa: E402
from sglang_pat.launch.processes import RANK_TITLE, end_engine  # noqa: E402
from sglang_pat.switch.order import OrderedReceiver  # noqa: E402

logger = logging.getLogger(__name__)


def run_rank(
    server_args: AdaptiveServerArgs,
    port_args: PortArgs,
    rank: int,
    gpu_id: int,
    channel_address: str,
    parent_pid: int,
    pipe_writer,
) -> None:
    """Run a rank's process: build the scheduler, report readiness, run SGLang's event loop.

    Any exception ends the whole engine, so no client waits for a rank that is gone.
    """
    load_plugins()
    args = make_rank_view(server_args)
    tp_rank = args.spec.config.base.tp_rank(rank)
    place = adapter.rank.configure(args, rank, gpu_id, tp_rank)
    setproctitle.setproctitle(f"{RANK_TITLE}{rank}")
    configure_logger(server_args, prefix=f" rank{rank}")
    if server_args.device == "cpu":
        # What SGLang compiles are a few tiny functions; asking the C++ compiler what it can do takes seconds.
        torch.compiler.set_stance("force_eager")
    try:
        from sglang_pat.host.scheduler import AdaptiveScheduler

        check_overrides()
        scheduler = AdaptiveScheduler(rank, channel_address, server_args=args, port_args=port_args, **place)
        pipe_writer.send(scheduler.get_init_info())
        pipe_writer.close()
        scheduler.run_event_loop()
    except (SGLangMismatch, Unsupported) as error:
        end_engine(parent_pid, pipe_writer, str(error))
    except Exception as error:
        logger.exception("rank %d failed", rank)
        end_engine(parent_pid, pipe_writer, f"rank {rank} failed: {type(error).__name__}: {format_one_line(error)}")


class AdaptiveDetokenizerManager(DetokenizerManager):
    """SGLang's detokenizer behind an :class:`OrderedReceiver`.

    A batch of tokens that it cannot handle ends the engine: its requests would never end.  Other messages are dropped.
    """

    def init_ipc_channels(self, port_args: PortArgs, server_args: AdaptiveServerArgs) -> None:
        super().init_ipc_channels(port_args, server_args)
        self.dropped = Dropped(server_args.enable_metrics)
        self.recv_from_scheduler = OrderedReceiver(self.recv_from_scheduler, self.dropped)

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        batches = (BatchTokenIDOutput, BatchEmbeddingOutput)
        self._request_dispatcher = IsolatingDispatcher(self._request_dispatcher, self.dropped, fatal=batches)


def run_detokenizer(server_args: AdaptiveServerArgs, port_args: PortArgs, parent_pid: int, pipe_writer) -> None:
    """Run the detokenizer's process, which has nothing to report."""
    run_detokenizer_process(server_args, port_args, AdaptiveDetokenizerManager)
