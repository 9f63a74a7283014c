"""How long a simulated step takes: linear in what it computes and reads."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.flags import flag, number


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients. The defaults are what a data sheet gives for a dense 8B model in bfloat16 on one 80 GB accelerator
    (about 400 TFLOP/s, 3 TB/s, 128 KiB of KV per token), not measured. Fit them to your own executor.
    """

    # Reading the weights once, and launching.
    step_ms: float = flag("every step that computes anything", default=6.0, type=number(0, 1e6), metavar="MS")
    prefill_us: float = flag("each prompt token computed", default=40.0, type=number(0, 1e6), metavar="US")
    # A sequence that computes its last known token: sampling, and its row through the layers.
    decode_us: float = flag("each sequence that decodes", default=20.0, type=number(0, 1e6), metavar="US")
    # Once a step for each position of keys and values.
    kv_read_ns: float = flag("each token of context attended to", default=45.0, type=number(0, 1e6), metavar="NS")

    def seconds(self, prefill_tokens: int, decodes: int, kv_tokens: int) -> float:
        """Duration of a step; 0 when it computes nothing."""
        if prefill_tokens + decodes == 0:
            return 0.0
        return (
            self.step_ms * 1e-3
            + prefill_tokens * self.prefill_us * 1e-6
            + decodes * self.decode_us * 1e-6
            + kv_tokens * self.kv_read_ns * 1e-9
        )
