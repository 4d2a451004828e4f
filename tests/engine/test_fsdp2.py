"""Models that ranks share, by FSDP2: what comes of them is what one process makes of copies.

Two ranks on the CPU, by gloo. helpers/compute_on_ranks.py computes on one process, by DDP and by
FSDP2, and has main() run with a stub of vLLM.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import fork
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from helpers import ASYNC, GRPO, LORA, REPO, fsdp2, loops, rollouts
from helpers.compute_on_ranks import step_and_save
from helpers.files import read_json_lines
from helpers.processes import CPU, TWO_RANKS, environment
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ppo_vllm_async as ppo

SHARED = ("ddp", "fsdp2")
NAMES = ("ppo_sync_lora.py", *ASYNC)
OF_COMPUTED_ROWS = {"val/ratio", "val/ratio_var", "policy/approxkl_avg", "policy/entropy_avg"}
OF_COMPUTED_ROWS |= {"val/update_tokens"}
PROGRAM = REPO / "tests" / "helpers" / "compute_on_ranks.py"


def check_metrics(name, found, expected):
    """But for what differs where the batch is cut in another way, or by the clock."""
    found, expected = (
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        for line in (found, expected)
    )
    if name in GRPO:  # whose ranks may compute some rows besides, which have no gradient
        assert found["val/update_tokens"] >= expected["val/update_tokens"]
        for one in OF_COMPUTED_ROWS:
            found[one] = expected[one] = 0.0
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [("one_gpu", 1, 1), ("ddp", 8, 1), ("fsdp2", 8, 1), ("fsdp2_two_nodes", 16, 2)],
)
def test_launcher_reads_our_files(name, processes, machines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    path = str(REPO / "scripts" / "accelerate" / f"{name}.yaml")
    args = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    args, *_ = _validate_launch_command(args)
    assert (args.num_processes, args.num_machines) == (processes, machines)
    assert args.mixed_precision == "no" and args.use_fsdp == name.startswith("fsdp2")
    args.main_process_ip, args.main_process_port, args.machine_rank = "host", 29500, 0
    variables = prepare_multi_gpu_env(args) if processes > 1 else {}
    sharding = {name: variables[name] for name in fsdp2.ENVIRONMENT if name in variables}
    assert sharding == (fsdp2.ENVIRONMENT if args.use_fsdp else {})


def test_each_rank_loads_its_models_and_no_task_of_slurm_is_a_rank(monkeypatch):
    """Loaded on one rank alone, the frozen models of the others would be zeros.

    A signal must end a script also if what started it ignores it; but nohup keeps SIGHUP away.
    """
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    signals = {}
    monkeypatch.setattr(signal, "signal", signals.__setitem__)
    accelerator, cpu_group = ppo.start_ranks(rollouts.tiny_args())
    assert (accelerator.num_processes, cpu_group) == (1, None)
    assert signals == dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@pytest.mark.parametrize("count", [1, 5, 6])
def test_each_rank_scores_in_as_many_passes(count):
    """One at a time, of held-out prompts. In a pass of its own a rank would wait for ever."""
    args = rollouts.tiny_args(per_device_train_batch_size=1)
    model, passes = rollouts.tiny_value_model(), Counter()
    model.register_forward_hook(lambda *_: passes.update([rank]))
    for rank in range(2):
        accelerator = rollouts.one_of_ranks(rank, 2)
        responses = rollouts.groups_of_equals()[: 4 * count : 4]
        assert len(ppo.reward_model_scores(accelerator, model, responses, args)) == count
    assert passes[0] == passes[1] == (count + 1) // 2


# ------------------------------------------------------------------------ what ranks make together


@pytest.fixture(scope="module")
def options_of(assets, few_prompts, reward_model, tmp_path_factory):
    """options_of("ppo_vllm_async.py", ranks=2): what all ranks do together is always the same."""
    tied = tmp_path_factory.mktemp("tied")
    options = {"tie_word_embeddings": True, "initializer_range": 0.3}
    config = AutoConfig.from_pretrained(assets / "model", **options)
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(tied)

    def options_of(name, ranks, folder=None):
        options = loops.options_of(name, few_prompts, folder) | {
            "eval_dataset": few_prompts / "test.parquet",
            "num_eval_prompts": 7,  # which is a multiple of no number of ranks
            "num_evals": 1,
            "total_episodes": 3 * 32,  # three steps of two updates
            "local_rollout_batch_size": 8 // ranks,
            "local_mini_batch_size": 16 // ranks,
            "per_device_train_batch_size": 4 // ranks,
            "max_grad_norm": 0.1,
        }
        of_script = {
            "ppo_sync_lora.py": {"reward_model_path": reward_model, "lora_rank": 4},
            "ppo_vllm_async.py": {"micro_batch_tokens": 80, "per_device_train_batch_size": 0},
            # Only the first rank has an engine, and not all rows have a gradient
            "grpo_vllm_async.py": {"model_name_or_path": tied, "vllm_gpus": 2, "beta": 0.0},
        }
        return options | of_script[name]

    return options_of


@pytest.fixture(scope="module")
def together(accelerator, options_of, tmp_path_factory):
    """What one process ("one") and two ranks ("ddp", "fsdp2") found: compute_on_ranks.py.

    In folder are their runs, see run_of: of three steps in float64.
    """
    folder, found = tmp_path_factory.mktemp("together"), SimpleNamespace()
    for name, script in LORA.items():
        fork.write_fork("lora", folder / name, script=script)

    found.alone = {"saved": step_and_save(accelerator, folder / "checkpoint_alone")}
    for how in ("ddp", "fsdp2", "one"):
        ranks = 1 if how == "one" else 2
        runs = [(name, options_of(name, ranks, folder / f"{how} {name}")) for name in NAMES]
        (folder / f"{how}.json").write_text(json.dumps(runs, default=str))
        launcher = TWO_RANKS if ranks == 2 else ()
        command = [sys.executable, *launcher, str(PROGRAM), str(folder), how]
        run = subprocess.run(command, env=environment(CPU), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-5000:]
        setattr(found, how, torch.load(folder / f"{how}.pt", weights_only=False))
    found.folder = folder
    return found


def run_of(together, how, name):
    run_dir = together.folder / f"{how} {name}" / "run"
    return SimpleNamespace(run_dir=run_dir, metrics=read_json_lines(run_dir / "metrics.jsonl"))


@pytest.mark.slow
def test_each_layer_is_a_unit_in_the_dtype_of_the_flag_and_a_float32_head_is_another(together):
    """Of two architectures in one process. Without names of layers the model would be one unit."""
    layers = {f"model.model.layers.{i}" for i in range(2)}
    # A whole trained model has 27 tensors; 14 layers have an adapter, of two matrices
    for name, count in (("trained", 27), ("adapted", 28), ("frozen", 0), ("value", 27)):
        model = together.fsdp2["units"][name]
        heads = {"model.score"} if name == "value" else set()
        assert model["units"] == {"", *layers, *heads} and model["after"] == {True}  # parts again
        dtypes = {f"{layer}.mlp": {(False, torch.bfloat16)} for layer in layers}  # whole ones
        dtypes["model.model.embed_tokens"] = {(False, torch.bfloat16)}
        assert model["in forward"] == dtypes
        gradients = model["gradients"].values()  # masters', which sum up passes in float32
        assert len(gradients) == count and {g.dtype for g in gradients} <= {torch.float32}
        assert all((gradient != gradient.bfloat16()).any() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
def test_policy_in_bfloat16_is_its_reference_at_equal_weights(how, together):
    """The KL penalty of the first step is 0, on the first rank's rows."""
    distance, logprobs = getattr(together, how)["distance"]
    assert distance == 0 and (logprobs < 0).any()


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["alone ddp", "alone fsdp2", "ddp fsdp2", "ddp one", "fsdp2 one"])
def test_checkpoint_is_read_under_any_number_of_ranks(ways, together):
    writer, reader = ways.split()
    folder, saved = together.folder / f"checkpoint_{writer}", getattr(together, writer)["saved"]
    # The policy's optimizer had not stepped
    parts = {path.name for path in folder.iterdir()}
    assert parts == saved.keys() == {"policy", "value_model", "value_model_optimizer"}
    assert {state["step"].item() for state in saved["value_model_optimizer"].values()} == {2}
    found = getattr(together, reader)[folder.name]
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


# -------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_weights_of_three_steps_are_those_of_one_process(
    name, how, together, options_of
):
    run, alone = (run_of(together, one, name) for one in (how, "one"))
    for line, expected in zip(run.metrics, alone.metrics, strict=True):
        check_metrics(name, line, expected)
    began_with = options_of(name, 1)["model_name_or_path"]
    folders = (run.run_dir / "model", alone.run_dir / "model", began_with)
    found, expected, first = (load_file(f"{folder}/model.safetensors") for folder in folders)
    if name in GRPO and how == "fsdp2":  # what is gathered shares no memory: it is saved twice
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
    assert found.keys() == expected.keys() == first.keys()
    is_merged = name in LORA  # in float32, of layers with an adapter
    for weight, value in expected.items():
        has_learnt = (value - first[weight]).abs().max() > 1e-4
        assert has_learnt == (not is_merged or "proj.weight" in weight)
        assert (found[weight] - value).abs().max() < (1e-6 if is_merged else 1e-12)
    model, report = AutoModelForCausalLM.from_pretrained(folders[0], output_loading_info=True)
    assert not any(report.values())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name in GRPO)


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
def test_vllm_gets_the_whole_weights(how, together):
    """Also where one rank alone has an engine: the others give their parts."""
    assert getattr(together, how)["not sent"] == []
