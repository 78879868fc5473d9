"""Time and memory of the loss head, against logits of all rows at once.

    python benchmarks/loss_head.py [--rows 8192] [--width 1536] [--vocab 32768] [--pairs 5] [--dtypes float32,bfloat16] [--softcap 15]

Forward and backward from the last hidden state to the gradients of it and of the head, with the logits capped at 15 as `modern`'s, or
with --softcap 0 as `portable`'s. The other way is transformers' own: fp32 logits, tanh, torch's cross_entropy. extra peak: the most
memory that was taken beyond what lay there before, gradients included; on a CPU by the process's resident set.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from common import DEVICE, arguments, in_turns, show

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


def main() -> None:
    options = arguments(__doc__, rows=8192, width=1536, vocab=32768, pairs=5, dtypes="float32,bfloat16", softcap=15.0)
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
