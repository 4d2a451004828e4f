"""Weight syncs of ppo_vllm_async.py by CUDA's ways, "ipc" and NCCL, into the real vLLM on the CPU.

Only the device is faked: helpers/faked_cuda_async.py. The way without CUDA, by file, is in every
run of test_runs_async.py. A sync that fails ends its process, so it gets one of its own.
"""

import copy
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import REPO, faked_cuda_async
from helpers.endings import check_end, new_mark
from helpers.faked_cuda_async import MAX_LENGTH, args_for
from helpers.processes import end, environment
from helpers.rollouts import VOCAB, tiny_language_model

import ppo_vllm_async

pytestmark = pytest.mark.slow

BACKENDS = ("ipc", "nccl")
PROMPTS = [
    ppo_vllm_async.Prompt("", "", ids, ids, None, None, None)
    for ids in (
        [2 + (7 * i * row + row) % (VOCAB - 2) for i in range(1, 4 + 5 * row)] for row in range(8)
    )
]


@pytest.fixture(scope="module")
def start_vllm():
    """start_vllm(backend, tied, dtype): a policy, and an engine without its weights.

    One process has all engines, one after the other, for only the first takes long to start.
    """
    engines, kinds, exports = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        # Here a call that fails raises, too; it must not end all tests
        patch.setattr(ppo_vllm_async, "end_at_once", lambda error: None)
        faked_cuda_async.add_gpus(patch.setattr, exports)
        for name, value in faked_cuda_async.ENVIRONMENT.items():
            patch.setenv(name, value)

        def start(backend, tied, dtype):
            args = args_for(backend, dtype=dtype)
            model = tiny_language_model(hidden_size=64, tie_word_embeddings=tied)
            placement = (0, 1, (1 if backend == "nccl" else 0,))
            if not engines:
                engines.append(ppo_vllm_async.VLLM(placement, model.config, MAX_LENGTH, args))
                vllm = engines[0]
            else:
                # As it comes out of VLLM.__init__
                vllm = copy.copy(engines[0])
                vllm.gpus, vllm.args, vllm.policy_version, vllm.nccl = (
                    placement[2],
                    args,
                    None,
                    None,
                )
                _, options = ppo_vllm_async.vllm_settings(vllm.gpus, vllm.folder, MAX_LENGTH, args)
                if kinds[-1] == (tied, dtype):
                    vllm.submit(faked_cuda_async.use_backend, backend).result(60)
                else:
                    restart = faked_cuda_async.start_again
                    vllm.submit(restart, options, model.config).result(120)
            kinds.append((tied, dtype))
            exports.clear()
            return SimpleNamespace(model=model, args=args, vllm=vllm, exports=exports)

        try:
            yield start
        finally:
            ppo_vllm_async.end_children()
            ppo_vllm_async.process_groups.clear()
            ppo_vllm_async.folders.clear()


def sync(system, version):
    """A sync that cannot succeed would wait for ever, since nothing ends this process."""
    synced = []

    def run():
        system.vllm.sync_weights(system.model, version)
        synced.append(version)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert synced == [version]


def differences(system):
    """|learner's - vLLM's log-probability| of each token that vLLM samples now."""
    args = system.args
    responses = system.vllm.sample(PROMPTS, list(range(len(PROMPTS))), args.temperature, 1)
    sequences = [(response.prompt.token_ids, response.token_ids) for response in responses]
    batch = ppo_vllm_async.collate(list(range(len(sequences))), sequences, "cpu")
    policy = ppo_vllm_async.PolicyModel(system.model, args)
    with torch.no_grad():
        mine, _ = policy(batch.inputs, batch.mask.shape[1])
    theirs = torch.tensor([logprob for response in responses for logprob in response.logprobs])
    return (mine[batch.mask.bool()] - theirs).abs()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_vllm_has_the_weights_that_were_synced(tied, dtype, backend, start_vllm):
    system = start_vllm(backend, tied, dtype)
    tensors = len(list(system.model.parameters()))
    for version in range(2):
        # It has random weights, or those of the test before; then those of before the change
        assert differences(system).mean() > 0.5
        sync(system, version)
        found = differences(system)
        if dtype == "float32":
            assert found.max() < 1e-4 and found.mean() < 1e-5
        else:
            assert found.mean() < 0.1
        assert system.vllm.policy_version == version
        # A tied head is sent once, as the embedding
        assert len(system.exports) == (tensors * (version + 1) if backend == "ipc" else 0)
        torch.manual_seed(version)
        for parameter in system.model.parameters():
            parameter.data.mul_(torch.empty_like(parameter).uniform_(0.2, 1.8))


# What happens; by which way weights go; which cause is told
CASES = [
    ("unknown name", "nccl", r"ValueError: .*surplus"),
    ("unknown name", "ipc", r"ValueError: .*surplus"),
    ("killed", "nccl", r".*BrokenProcessPool: A process in the process pool was terminated"),
    ("hung", "nccl", "TimeoutError"),
    ("worker of two killed", "file", "vllm.*EngineDeadError|RuntimeError"),
]


@pytest.mark.parametrize(("fault", "backend", "cause"), CASES)
def test_sync_that_cannot_succeed_ends_the_process(fault, backend, cause, tmp_path):
    mark = new_mark()
    program = str(REPO / "tests" / "helpers" / "faked_cuda_async.py")
    command = [sys.executable, program, fault, backend]
    with open(tmp_path / "stdout", "w") as stdout, open(tmp_path / "stderr", "w") as stderr:
        streams = {"stdout": stdout, "stderr": stderr}
        process = subprocess.Popen(
            command, cwd=REPO, env=environment(mark), start_new_session=True, **streams
        )
    try:
        process.wait(150)
        errors = (tmp_path / "stderr").read_text()
        assert process.returncode == 1, errors
        check_end((tmp_path / "stdout").read_text(), mark, within=20)
    finally:
        end(process)
    assert re.search(f"^{cause}", errors, re.MULTILINE), errors
