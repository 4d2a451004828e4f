"""Weight syncs by CUDA's ways, with only the device faked: helpers/faked_cuda.py.

The way without CUDA, by file, is tested in test_engine.py.
"""

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from helpers import REPO, faked_cuda
from helpers.faked_cuda import StubVLLM, wait_for_ever
from helpers.formulas import padded_forward
from helpers.processes import TWO_RANKS, end, environment
from helpers.rollouts import VOCAB, load_policy, tiny_args, tiny_config, tiny_policy

import ppo_sync

BACKENDS = ("ipc", "nccl")
NUM_WEIGHTS = len(tiny_policy().state_dict())  # of a policy with a head of its own
LIMIT = 15  # seconds within which a sync that cannot succeed has to end


def args_for(backend, **changes):
    return tiny_args(vllm_gpus=(1,) if backend == "nccl" else (), **changes)


def within_limit(function, *args):
    """Runs function(*args) and raises what it raises. A hang is a failure: it runs in a thread."""
    endings = []

    def run():
        error = None
        try:
            function(*args)
        except BaseException as raised:
            error = raised
        endings.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert endings, f"still waiting after {LIMIT} s"
    if endings[0] is not None:
        raise endings[0]


def sync(system, version=0):
    parts = (system.accelerator, None, system.engines, system.policy, version, system.args)
    within_limit(ppo_sync.sync_weights, *parts)


def layers_of(policy, tied=False):
    """The names of the weights that one call hands over, for each call."""
    names = list(policy.model.state_dict())
    layers = [["model.embed_tokens.weight"]]
    layers += [[name for name in names if f"layers.{i}." in name] for i in (0, 1)]
    layers += [["model.norm.weight"]]
    if not tied:
        layers += [["lm_head.weight"]]
    return layers


# ---------------------------------------------------------------------- vLLM is a stub in a thread


@pytest.fixture
def exports(monkeypatch):
    """A machine with four GPUs; the tensors that were handed out on it."""
    exports = []
    faked_cuda.add_gpus(4, monkeypatch.setattr, exports)
    return exports


@pytest.fixture
def meetings(monkeypatch):
    return faked_cuda.add_nccl(monkeypatch.setitem)


@pytest.fixture
def make_system(accelerator, exports, meetings):
    """make_system("ipc", faults={...}, dtype="bfloat16"): a policy, and a stub that it goes to."""

    def make(backend, policy=None, names=None, faults=None, **changes):
        args = args_for(backend, **changes)
        policy = tiny_policy() if policy is None else policy
        vllm = StubVLLM(names or policy.model.state_dict(), meetings, faults).start()
        engines = ppo_sync.make_engines(None, args)
        vllm.attach(engines[0])
        parts = {"policy": policy, "args": args, "engines": engines, "vllm": vllm}
        return SimpleNamespace(accelerator=accelerator, **parts)

    return make


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_layer_is_one_call(backend, tied, dtype, make_system, exports):
    policy = tiny_policy(tie_word_embeddings=tied)
    system = make_system(backend, policy, dtype=dtype)
    layers = layers_of(policy, tied)
    calls = [f"layer {i}" for i in range(len(layers))]
    for version in (3, 4):
        for parameter in policy.parameters():
            parameter.data.add_(0.1)
        sync(system, version)
        weights = policy.model.state_dict()
        vllm = system.vllm
        assert vllm.policy_version == version
        connect = ["init"] if version == 3 else []  # once
        assert vllm.calls == [*connect, "start", *calls, "finish", "reset_prefix_cache"]

        infos = vllm.infos[len(connect) :]
        assert [info["names"] for info in infos] == layers
        sent = [name for layer in layers for name in layer]
        assert list(vllm.weights) == sent
        for name in sent:
            expected = weights[name].to(getattr(torch, dtype))
            assert vllm.weights[name].dtype == expected.dtype
            assert torch.equal(vllm.weights[name], expected), name
        for info in infos:
            assert info["dtype_names"] == [dtype] * len(info["names"])
            assert info["shapes"] == [list(weights[name].shape) for name in info["names"]]

        assert len(exports) == (len(sent) if backend == "ipc" else 0)
        vllm.calls, vllm.infos, vllm.weights = [], [], {}
        exports.clear()


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_learner_is_rank_0_of_the_communicator_and_vllms_workers_follow(
    num_gpus, make_system, meetings
):
    gpus = (1, 2)[:num_gpus]
    system = make_system("nccl")
    system.engines[0].gpus = gpus
    sync(system)
    info = system.vllm.infos[0]
    assert info.keys() == {"master_address", "master_port", "rank_offset", "world_size"}
    assert list(meetings) == [info["master_port"]]
    members = sorted(meetings[info["master_port"]].members)
    assert members == [("127.0.0.1", rank, 1 + num_gpus) for rank in (0, 1)]


def test_shared_gpu_needs_no_information(make_system):
    system = make_system("ipc")
    sync(system)
    assert system.vllm.infos[0] == {}


def test_tensors_are_handed_over_as_vllm_reads_them(exports):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T)
    model.register_buffer("count", torch.tensor([2**40]))
    (weight,), (count,) = (
        layer.values() for layer in ppo_sync.gather_layers(model, tiny_args(dtype="bfloat16"))
    )
    assert weight.is_contiguous() and weight.dtype == torch.bfloat16 and weight.shape == (3, 2)
    assert weight.tolist() == [[0, 3], [1, 4], [2, 5]] and not weight.requires_grad
    assert count.tolist() == [2**40] and count.dtype == torch.int64


def test_each_engine_of_a_rank_gets_all_weights(make_system, meetings):
    system = make_system("nccl", vllm_tensor_parallel_size=1)
    second = ppo_sync.VLLM((2,), 1, 2, system.args)
    other = StubVLLM(system.policy.model.state_dict(), meetings).start()
    system.engines.append(other.attach(second))
    sync(system, version=5)
    assert other.calls == system.vllm.calls and len(meetings) == 2
    weights = system.policy.model.state_dict()
    for vllm in (system.vllm, other):
        assert vllm.policy_version == 5
        assert all(torch.equal(vllm.weights[name], weights[name]) for name in weights)


@pytest.mark.parametrize("fault", ["none", "start", "layer 0", "layer 3", "finish"])
def test_rank_takes_part_in_every_gather_whatever_its_engine_does(
    fault, make_system, exports, monkeypatch
):
    def fail(vllm):
        raise KeyError("this one")

    taken = []

    def count_layers(model, args, gather=ppo_sync.gather_layers):
        for layer in gather(model, args):
            taken.extend(layer)
            yield layer

    system = make_system("ipc", faults={fault: fail})
    monkeypatch.setattr(ppo_sync, "gather_layers", count_layers)
    if fault == "none":
        system.engines = []  # another rank owns them all
        sync(system)
        assert exports == []
    else:
        with pytest.raises(KeyError, match="this one"):
            sync(system)
    assert taken == list(system.policy.model.state_dict())


# ---- Faults: each ends the sync with its cause


@pytest.mark.parametrize("backend", BACKENDS)
def test_name_that_vllm_does_not_know_ends_the_sync(backend, make_system):
    policy = tiny_policy()
    # Others of its layer come after it, which NCCL would never get rid of
    unknown = "model.layers.1.self_attn.k_proj.weight"
    names = [name for name in policy.model.state_dict() if name != unknown]
    system = make_system(backend, policy, names)
    with pytest.raises(ValueError, match=unknown) as caught:
        sync(system)
    assert "in vLLM's process" in str(caught.value.__cause__)
    assert system.vllm.calls[-1] == "layer 2"


CALLS = ("init", "start", "layer 0", "layer 2", "finish", "reset_prefix_cache")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_worker_that_raises_ends_the_sync(backend, call, make_system):
    def fail(vllm):
        raise MemoryError("no room for it")

    system = make_system(backend, faults={call: fail})
    with pytest.raises(MemoryError, match="no room"):
        sync(system)
    assert system.vllm.calls[-1] == call
    assert system.vllm.policy_version is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("death", [StubVLLM.die, StubVLLM.die_with_a_child_left])
def test_engine_that_dies_ends_the_sync(backend, call, death, make_system):
    system = make_system(backend, faults={call: death})
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        sync(system)
    assert system.vllm.calls[-1] == call


def test_failure_of_our_own_side_ends_the_sync(make_system, monkeypatch):
    class Broken(faked_cuda.StubCommunicator):
        def broadcast(self, tensor, src, stream):
            raise OSError("the network is down")

    system = make_system("nccl")
    faked_cuda.add_nccl(monkeypatch.setitem, system.vllm.meetings, Broken)
    with pytest.raises(OSError, match="network is down"):
        sync(system)
    assert system.vllm.weights == {}  # it still waits


def test_failure_of_vllm_is_the_cause_where_our_own_side_fails_too(make_system, monkeypatch):
    class Broken(faked_cuda.StubCommunicator):
        def broadcast(self, tensor, src, stream):
            raise OSError("the other side has gone")

    def fail(vllm):
        time.sleep(0.2)
        raise MemoryError("no room for it")

    system = make_system("nccl", faults={"layer 0": fail})
    faked_cuda.add_nccl(monkeypatch.setitem, system.vllm.meetings, Broken)
    with pytest.raises(MemoryError, match="no room"):
        sync(system)


def test_failure_of_our_own_side_to_connect_ends_the_sync(make_system, monkeypatch):
    class Broken:
        def __init__(self, group, device):
            raise OSError("no NCCL here")

    system = make_system("nccl", faults={"init": wait_for_ever})
    faked_cuda.add_nccl(monkeypatch.setitem, system.vllm.meetings, Broken, waits=False)
    with pytest.raises(OSError, match="no NCCL here"):
        sync(system)


def test_handle_that_cannot_be_made_ends_the_sync(make_system, monkeypatch):
    def fail(tensor):
        raise OSError("no handles")

    system = make_system("ipc")
    monkeypatch.setattr(ppo_sync, "reduce_tensor", fail)
    with pytest.raises(OSError, match="no handles"):
        sync(system)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["init", "layer 2", "finish"])
def test_engine_that_does_not_answer_ends_the_sync(backend, call, make_system, monkeypatch):
    monkeypatch.setattr(ppo_sync, "WEIGHT_SYNC_TIMEOUT", 0.1)
    system = make_system(backend, faults={call: wait_for_ever})
    with pytest.raises(TimeoutError, match=r"vLLM has not answered for 0\.1 seconds"):
        sync(system)


def test_broadcast_that_does_not_end_ends_the_sync(make_system, monkeypatch):
    class Endless(faked_cuda.StubCommunicator):
        def broadcast(self, tensor, src, stream):
            super().broadcast(tensor, src, stream)
            wait_for_ever()

    monkeypatch.setattr(ppo_sync, "WEIGHT_SYNC_TIMEOUT", 1)
    system = make_system("nccl")
    faked_cuda.add_nccl(monkeypatch.setitem, system.vllm.meetings, Endless)
    with pytest.raises(TimeoutError, match="NCCL has sent nothing for 1 seconds"):
        sync(system)


# ---- The start of an engine


@pytest.fixture
def starting(make_system, monkeypatch):
    """An engine that says nothing yet, and main()'s wait for it."""
    system = make_system("ipc")
    (engine,) = ppo_sync.make_engines(None, system.args)
    vllm = StubVLLM([], {})
    monkeypatch.setattr(ppo_sync.VLLM, "start", lambda self, config, length: vllm.attach(self))

    def start():
        within_limit(ppo_sync.start_engines, None, [engine], tiny_config(), 32)

    return SimpleNamespace(engine=engine, vllm=vllm, start=start)


def after(seconds, function, *args):
    threading.Timer(seconds, function, args).start()


def test_slow_start_is_waited_for(starting):
    after(1.5, starting.vllm.own_end.send, (None, None, ""))
    began = time.monotonic()
    starting.start()
    assert time.monotonic() - began > 1.4
    assert starting.engine.has_started(0)  # and it is not waited for again


def test_engine_that_dies_in_its_start_ends_the_wait(starting):
    after(0.5, starting.vllm.process.die)
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        starting.start()


def test_engine_that_never_starts_ends_the_wait(starting, monkeypatch):
    monkeypatch.setattr(ppo_sync, "VLLM_START_TIMEOUT", 1)
    with pytest.raises(TimeoutError, match="has not started within 1 seconds"):
        starting.start()


# ---- A head that is tied, or said to be


def test_engine_unties_the_head_where_the_policys_is_not_tied(exports):
    for tied in (False, True):
        config = tiny_config(tie_word_embeddings=tied)
        options = ppo_sync.vllm_options((0,), config, "", 32, tiny_args())
        expected = None if tied else {"tie_word_embeddings": False}
        assert options.get("hf_overrides") == expected
        assert options["load_format"] == "dummy"


def save_called_tied(folder):
    """A checkpoint that has a head of its own, though its config says that it is tied."""
    policy = tiny_policy(hidden_size=64, tie_word_embeddings=False)
    policy.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return policy


def test_checkpoints_own_head_is_loaded_and_sent(make_system, tmp_path):
    saved = save_called_tied(tmp_path)
    policy = load_policy(tiny_args(model_name_or_path=str(tmp_path)))
    assert policy.model.config.tie_word_embeddings is False
    system = make_system("ipc", policy)
    sync(system)
    assert torch.equal(system.vllm.weights["lm_head.weight"], saved.model.lm_head.weight)
    assert not torch.equal(saved.model.lm_head.weight, saved.model.model.embed_tokens.weight)


def test_tied_checkpoint_stays_tied(tmp_path):
    policy = tiny_policy(tie_word_embeddings=True)
    policy.model.save_pretrained(tmp_path)
    policy = load_policy(tiny_args(model_name_or_path=str(tmp_path)))
    assert policy.model.config.tie_word_embeddings is True


# ---- A policy that accelerate compiles


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_policy_is_sent_under_the_plain_names(
    regional, make_system, accelerator, monkeypatch
):
    policy = tiny_policy()
    names = list(policy.model.state_dict())
    layers = layers_of(policy)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    monkeypatch.setitem(accelerator.state._shared_state, "dynamo_plugin", plugin)
    compiled = accelerator.prepare(policy)
    names_of_compiled = list(compiled.state_dict())
    assert any("_orig_mod" in name for name in names_of_compiled)
    system = make_system("ipc", compiled, names)
    for parameter in compiled.parameters():
        parameter.data.add_(0.1)
    sync(system)
    assert [info["names"] for info in system.vllm.infos[1:]] == layers
    weights = zip(names, compiled.parameters(), strict=True)
    assert all(torch.equal(system.vllm.weights[name], weight) for name, weight in weights)
    # The policy that trains is as it was
    assert list(compiled.state_dict()) == names_of_compiled


# ------------------------------------------------------------------------ two ranks, each a process


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two_rank_sync.py found: {scenario: [what rank 0 says of it, what rank 1 says]}."""
    folder = tmp_path_factory.mktemp("ranks")
    program = str(REPO / "tests" / "helpers" / "two_rank_sync.py")
    command = [sys.executable, *TWO_RANKS, program, str(folder)]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
    try:
        process.wait(90)
    except subprocess.TimeoutExpired:
        end(process)
    assert process.returncode == 0, (folder / "output").read_text()
    ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    return {scenario: [rank[scenario] for rank in ranks] for scenario in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["nccl tied", "nccl untied", "ipc tied", "ipc untied"])
def test_sharded_weights_are_gathered_by_all_ranks_and_sent_by_the_owner(scenario, two_ranks):
    owner, other = two_ranks[scenario]
    tensors = NUM_WEIGHTS - ("untied" not in scenario)
    assert owner["error"] is None and other["error"] is None
    assert owner["gathers"] == other["gathers"] == tensors
    assert owner["engines"] == ([[2]] if "nccl" in scenario else [[0]])
    assert owner["received"] == tensors and owner["equal"]
    assert other["engines"] == [] and other["exports"] == 0
    assert owner["exports"] == (tensors if "ipc" in scenario else 0)


@pytest.mark.slow
def test_colocated_ranks_export_each_to_its_own_engine(two_ranks):
    for rank, found in enumerate(two_ranks["colocated"]):
        assert found["error"] is None and found["engines"] == [[rank]]
        assert (
            found["received"] == found["exports"] == found["gathers"] == NUM_WEIGHTS
            and found["equal"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["start", "layer 1", "finish", "dies"])
def test_failed_engine_ends_the_sync_on_both_ranks(fault, two_ranks):
    owner, other = two_ranks[f"fault: {fault}"]
    cause = "RuntimeError: vLLM's process died with exit code -9; see above"
    if fault != "dies":
        cause = f"MemoryError: no room in {fault}"
    assert owner["error"] == cause
    assert other["error"] == f"RuntimeError: rank 0 failed: {cause}"
    assert owner["gathers"] == other["gathers"] == NUM_WEIGHTS  # or the other would wait in them
    assert max(owner["seconds"], other["seconds"]) < LIMIT


@pytest.mark.slow
def test_slow_start_of_one_engine_is_waited_for_on_both_ranks(two_ranks):
    for found in two_ranks["slow start"]:
        assert found["error"] is None and 1.4 < found["seconds"] < LIMIT


@pytest.mark.slow
def test_engine_that_dies_in_its_start_ends_both_ranks(two_ranks):
    others, owners = two_ranks["death in the start"]
    assert owners["error"] == "RuntimeError: vLLM's process died with exit code -9; see above"
    assert others["error"] == f"RuntimeError: rank 1 failed: {owners['error']}"
    assert max(others["seconds"], owners["seconds"]) < LIMIT


@pytest.mark.slow
def test_compiled_policy_of_two_ranks_is_sent_under_the_plain_names(two_ranks):
    for found in two_ranks["compiled"]:
        assert found["error"] is None and found["received"] == NUM_WEIGHTS and found["equal"]
        assert found["inside"] == ["DistributedDataParallel"] * 2  # before and after


# -------------------------------------------------------------------------- the real vLLM, on a CPU

PROMPTS = [
    [2 + (7 * i * row + row) % (VOCAB - 2) for i in range(1, 4 + 5 * row)] for row in range(8)
]
MAX_LENGTH = 64
SEEDS = [ppo_sync.stable_hash(row) for row in range(8)]
HEADS = ("tied", "called tied", "untied")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a policy's checkpoint, by what its head is."""
    folders = {head: tmp_path_factory.mktemp("model") for head in HEADS}
    for head in ("tied", "untied"):
        policy = tiny_policy(hidden_size=64, tie_word_embeddings=head == "tied")
        policy.model.save_pretrained(folders[head])
    save_called_tied(folders["called tied"])
    return folders


@pytest.fixture(scope="module")
def start_vllm(checkpoints):
    """start_vllm(backend, head, dtype): a policy, and an engine without its weights.

    One process has all engines, one after the other, for only the first takes long to start.
    """
    engines, kinds = [], []
    with pytest.MonkeyPatch.context() as patch:
        pynccl = "vllm.distributed.device_communicators.pynccl"
        patch.setattr(f"{pynccl}.PyNcclCommunicator", faked_cuda.Communicator)
        faked_cuda.add_gpus(2, patch.setattr, exports=[])
        patch.setattr(ppo_sync, "run_vllm", faked_cuda.run_vllm)
        # What an engine on the CPU has beside, and one on a GPU has not
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")

        def start(backend, head, dtype):
            args = args_for(
                backend,
                model_name_or_path=str(checkpoints[head]),
                dtype=dtype,
                temperature=1.0,
                response_length=8,
                vllm_enforce_eager=True,
                vllm_gpu_memory_utilization=0.3,
            )
            policy = load_policy(args)
            (engine,) = ppo_sync.make_engines(None, args)
            if not engines:
                engines.append(engine)
                ppo_sync.start_engines(None, engines, policy.model.config, MAX_LENGTH)
            else:
                options = ppo_sync.vllm_options(
                    engine.gpus, policy.model.config, "", MAX_LENGTH, args
                )
                engine.process, engine.connection = engines[0].process, engines[0].connection
                if kinds[-1] == (head, dtype):
                    engine.send(faked_cuda.use_backend, backend)
                else:
                    engine.send(faked_cuda.start_again, options)
                engine.receive(60)
            kinds.append((head, dtype))
            parts = {"policy": policy, "args": args, "engines": [engine]}
            return SimpleNamespace(accelerator=Accelerator(cpu=True), **parts)

        try:
            yield start
        finally:
            if engines:
                engines[0].stop()


def differences(system):
    """|learner's - vLLM's log-probability| of each token that vLLM samples now."""
    (engine,) = system.engines
    engine.send(ppo_sync.sample_responses, PROMPTS, SEEDS, 1.0, system.args)
    responses, logprobs, _ = engine.receive(60)
    with torch.no_grad(), ppo_sync.autocast(system.accelerator, system.args):
        (mine, _), mask = padded_forward(system.policy, PROMPTS, responses, "cpu")
    theirs = torch.tensor([logprob for row in logprobs for logprob in row])
    return (mine[mask.bool()] - theirs).abs()


COMBINATIONS = [
    (backend, head, dtype)
    for head in HEADS
    for dtype in ("bfloat16", "float32")
    for backend in BACKENDS
    if (head, dtype) != ("called tied", "bfloat16")
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "head", "dtype"), COMBINATIONS)
def test_vllm_has_the_weights_that_were_synced(backend, head, dtype, start_vllm):
    system = start_vllm(backend, head, dtype)
    for version in range(2):
        # It has random weights, or those of the test before; then those of before the change
        assert differences(system).mean() > 0.5
        sync(system, version)
        found = differences(system)
        if dtype == "float32":
            assert found.max() < 1e-4
        else:
            assert found.mean() < 0.1
        torch.manual_seed(version)
        for parameter in system.policy.parameters():
            parameter.data.mul_(torch.empty_like(parameter).uniform_(0.2, 1.8))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_name_that_the_real_vllm_does_not_know_ends_the_sync(backend, start_vllm):
    # After the tests above: it spoils the engine
    system = start_vllm(backend, "untied", "float32")
    system.policy.model.surplus = torch.nn.ModuleList([torch.nn.Linear(2, 2)])  # two tensors
    with pytest.raises(ValueError, match="surplus"):
        sync(system)


@pytest.mark.slow
def test_vllm_that_is_killed_ends_the_sync(start_vllm, monkeypatch):
    # Last in this file
    system = start_vllm("nccl", "untied", "float32")
    (engine,) = system.engines

    def kill_in_the_second_layer(model, args, gather=ppo_sync.gather_layers):
        for i, layer in enumerate(gather(model, args)):
            if i == 1:
                engine.process.kill()
            yield layer

    monkeypatch.setattr(ppo_sync, "gather_layers", kill_in_the_second_layer)
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        sync(system)
