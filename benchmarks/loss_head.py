"""Time and memory of the loss head, against logits of all rows at once.

    python benchmarks/loss_head.py [--rows 8192] [--width 1536] [--vocab 32768] [--pairs 5] [--dtypes float32,bfloat16] [--softcap 15]
    python benchmarks/loss_head.py --bytes 1 [--rows 8192] [--width 768] [--vocab 32768] [--softcap 15]

Forward and backward from the last hidden state to the gradients of it and of the head, with the logits capped at 15 as `modern`'s, or
with --softcap 0 as `portable`'s. The other way is transformers' own: fp32 logits, tanh, torch's cross_entropy. extra peak: the most
memory that was taken beyond what lay there before, gradients included; on a CPU by the process's resident set.

--bytes 1 counts instead what the compiled head reads and writes under bf16 autocast, by the compiler's own count for this kind of device,
for each byte of the logits in bf16: ours in one chunk, and whole logits as nanochat's head makes them. On a CPU the compiler keeps the
tanh of the softcap in fp32, on a GPU it computes it again.
"""

import logging
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log

sys.path.insert(0, str(Path(__file__).parent))
from common import DEVICE, arguments, in_turns, show

from pipeline.model import modeling_tandem
from pipeline.model.modeling_tandem import summed_cross_entropy


class Head:
    def __init__(self, rows: int, width: int, vocab: int, dtype: torch.dtype, softcap: float):
        self.softcap = softcap or None
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, width, generator=generator).to(DEVICE, dtype).requires_grad_()
        self.weight = (0.02 * torch.randn(vocab, width, generator=generator)).to(DEVICE).requires_grad_()
        self.labels = torch.randint(0, vocab, (rows,), generator=generator).to(DEVICE)
        self.autocast = torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32)

    def chunked(self) -> torch.Tensor:
        with self.autocast:
            loss, _ = summed_cross_entropy(self.hidden, self.weight, self.labels, softcap=self.softcap)
        return self._backward(loss / len(self.labels))

    def full(self) -> torch.Tensor:
        with self.autocast:
            logits = F.linear(self.hidden, self.weight).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return self._backward(F.cross_entropy(logits, self.labels))

    def _backward(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss.detach()

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None


def extra_peak(head: Head, way) -> int:
    """Bytes at the highest point of one call beyond those before it."""
    head.forget()
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        way()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the high water mark falls to what is resident now
    before = _resident("VmRSS")
    way()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def chunked_head(softcap: float | None):
    """Return the loss of our head as a function to compile."""

    def head(hidden, weight, labels):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return summed_cross_entropy(hidden, weight, labels, softcap=softcap)[0]

    return head


def whole_head(softcap: float | None):
    """Return the loss of a head that holds all logits in fp32."""

    def head(hidden, weight, labels):
        logits = F.linear(hidden, weight.to(hidden.dtype)).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, labels, reduction="sum")

    return head


def bytes_per_logit(head, *, rows: int, width: int, vocab: int) -> float:
    """Return the bytes that a compiled head moves, forward and backward, for each byte of its logits in bf16."""
    torch._dynamo.reset()
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # at which the compiler counts
    hidden = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    with inductor_config.patch(fx_graph_cache=False):  # a cached graph is not counted
        torch.compile(head, fullgraph=True)(hidden, weight, labels).backward()
    return metrics.num_bytes_accessed / (2 * rows * vocab)


def show_bytes(options) -> None:
    modeling_tandem.CHUNK_ELEMENTS[DEVICE] = options.rows * options.vocab
    rows = []
    for softcap in {options.softcap or None, None}:
        shape = {"rows": options.rows, "width": options.width, "vocab": options.vocab}
        ours = bytes_per_logit(chunked_head(softcap), **shape)
        other = bytes_per_logit(whole_head(softcap), **shape)
        rows.append({"softcap": softcap or 0.0, "ours": ours, "whole_logits": other, "ratio": ours / other})
    show(options, rows)


def main() -> None:
    options = arguments(
        __doc__, rows=8192, width=1536, vocab=32768, pairs=5, dtypes="float32,bfloat16", softcap=15.0, bytes=0
    )
    if options.bytes:
        show_bytes(options)
        return
    rows = []
    for name in options.dtypes.split(","):
        head = Head(options.rows, options.width, options.vocab, getattr(torch, name), options.softcap)
        row = {"dtype": name, **in_turns(head.chunked, head.full, pairs=options.pairs)}
        ours, other = extra_peak(head, head.chunked), extra_peak(head, head.full)
        row |= {"ours_peak_mb": ours / 1e6, "other_peak_mb": other / 1e6, "peak_ratio": ours / other}
        losses = [head.chunked().item(), head.full().item()]
        row["loss_difference"] = abs(losses[0] / losses[1] - 1)
        rows.append(row)
    show(options, rows)


if __name__ == "__main__":
    main()
