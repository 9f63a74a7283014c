"""How long a simulated step takes: linear in what it computes and reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients. The defaults are what a data sheet gives for a dense 8B model in bfloat16 on one 80 GB accelerator
    (about 400 TFLOP/s, 3 TB/s, 128 KiB of KV per token); they were not measured. Fit them to your own executor.
    """

    # Reading the weights once, and launching: paid by every step that computes anything.
    step_ms: float = 6.0
    # One token of a chunk of known tokens.
    prefill_us: float = 40.0
    # One sequence that computes its last known token: sampling, and its row through the layers.
    decode_us: float = 20.0
    # One position of keys and values that a sequence attends to in this step, once a step.
    kv_read_ns: float = 45.0

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
