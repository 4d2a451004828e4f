"""main() of a script with a stub in place of vLLM, in seconds.

Everything else is real: the debug model and data, the thread and the queues, the updates.
"""

import contextlib
import copy
import importlib
import io
import itertools
import queue
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from transformers import AutoModelForCausalLM

from helpers import REPO, hooks
from helpers.files import read_json_lines
from helpers.processes import flags_of
from helpers.rollouts import collate_pairs
from helpers.runs import with_lists

STEPS, EPISODES = 3, 16
STOP = 1  # the debug model's end token


def sample_digits(seed, args):
    """Return the token ids of a response. One in four has no end."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, args.response_length, (1,), generator=generator))
    digits = torch.randint(5, 15, (args.response_length,), generator=generator)
    if seed % 4 == 0:
        return digits.tolist()
    return [*digits[: size - 1].tolist(), STOP]


def report_logprobs(policy, input_ids, mask, seed, is_old):
    """Return the log-probabilities that a stub reports, a row of numbers for each response.

    They are slightly wrong. Those of an older policy's batches, which need not agree, are far off.
    """
    with torch.no_grad():
        logprobs, _ = policy(input_ids, mask)
    error = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed))
    logprobs += error if is_old else 1e-4 * error
    return [row[inside].tolist() for row, inside in zip(logprobs, mask.bool(), strict=True)]


def make_stub(script):
    """Return a class for script.VLLM that samples digits with the weights that it got last."""

    class StubVLLM:
        made = []  # noqa: RUF012

        def __init__(self, placement, config, max_length, args):
            assert placement == (0, 1, ())
            self.engine_index, self.num_engines = 0, 1
            self.args, self.max_length, self.policy_version = args, max_length, None
            model = AutoModelForCausalLM.from_config(config).eval()
            self.is_lora = bool(getattr(args, "lora_rank", 0))  # the preflight sets it to 0
            if self.is_lora:  # vLLM loads the checkpoint then
                path = args.model_name_or_path
                model = script.load_model(AutoModelForCausalLM, path, args, trained=True)
            self.policy = script.PolicyModel(model, args)
            self.seeds, self.order = [], []  # order: of weight syncs and requests
            self.temperatures = []  # of each seed
            self.made.append(self)

        def sync_weights(self, weights, version):
            found = self.policy.model.load_state_dict(dict(weights), strict=not self.is_lora)
            assert not found.unexpected_keys
            self.policy_version = version
            if version >= 0:  # else it is check_adapter's
                self.order.append(f"weights {version}")

        def sample(self, prompts, seeds, temperature):
            self.seeds += seeds
            self.temperatures += [temperature] * len(seeds)
            prompts = [getattr(p, "prompt", p) for p in prompts]  # of a fork's responses
            rows = [np.array(sample_digits(seed, self.args), np.int32) for seed in seeds]
            sequences = [(p.token_ids, row) for p, row in zip(prompts, rows, strict=True)]
            if not prompts:
                return []
            assert max(sum(map(len, pair)) for pair in sequences) <= self.max_length
            input_ids, mask, _ = collate_pairs(sequences)
            syncs = [one for one in self.order if one.startswith("weights")]
            is_old = getattr(self.args, "async_mode", False) and syncs not in ([], ["weights 0"])
            logprobs = report_logprobs(self.policy, input_ids, mask, seeds[0], is_old)
            return [
                script.Response(prompt, row, np.array(of_row, np.float32), stopped=STOP in row[-1:])
                for prompt, row, of_row in zip(prompts, rows, logprobs, strict=True)
            ]

        def submit(self, function, prompts, seeds, temperature, version, args):
            """Answer check_adapter, which asks each engine separately."""
            assert function is script.sample_responses and version == self.policy_version == -1
            responses = self.sample(prompts, list(seeds), temperature)
            return SimpleNamespace(result=lambda: responses)

    return StubVLLM


def catch_thread(script, put):
    """Make main() raise an error in the thread of an async script. Return what ends the thread.

    Without this, an error would end the process of the tests.
    """
    of_thread = SimpleNamespace()

    def run(call, given):
        vars(of_thread).update(given, thread=threading.current_thread())
        call()

    def pass_on(error):
        with contextlib.suppress(queue.Full):  # when it is over
            of_thread.response_Q.put_nowait(error)

    def gather(call, given):
        if isinstance(given["part"], BaseException):
            raise given["part"]
        return call()

    def end():
        if vars(of_thread):
            of_thread.prompts_Q.put("no request")  # an error
            of_thread.thread.join()

    hooks.around(script, "generation_thread", run, put=put)
    hooks.around(script, "gather_rollout", gather, put=put)
    put(script, "end_at_once", pass_on)
    return end


def reward_in_this_process(script, score, put):
    """Make --reward_fn call score(data_source, response, ground_truth), without workers."""

    def reward_fn(data_source, response, ground_truth, extra_info):
        return score(data_source, response, ground_truth)

    def call_worker(workers, response, args):
        return script.call_reward_fn(response)

    put(script, "reward_function", reward_fn)
    put(script, "start_reward_workers", lambda args: None)
    put(script, "call_worker", call_worker)


def run_loop(name, files, folder, score=None, fails_at=None, **changes):
    """What was seen of main(); score(data_source, response, ground_truth) rewards it.

    files: the folder of few_prompts; fails_at: the update that does not come, but a RuntimeError;
    changes: to the options below.
    """
    script = importlib.import_module(name.removesuffix(".py"))
    stub = make_stub(script)
    options = options_of(name, files, folder)
    if hasattr(script.Args, "kl_estimator"):
        options["kl_estimator"] = "kl1"
    options |= changes
    if not options["non_stop_penalty"]:  # which it is a part of
        options["min_response_length"] = 0
    seen = SimpleNamespace(name=name, script=script, run_dir=Path(options["output_dir"], "run"))
    seen.batches, seen.mini_batches = [], []
    seen.rows = []  # that each update has computed
    seen.rates = defaultdict(list)  # of the updates of each model
    seen.norms = defaultdict(list)  # of gradients, by model and step
    seen.decays = set()  # of weights
    seen.programs = []  # that were called: name, and steps in metrics.jsonl at that time
    metrics = seen.run_dir / "metrics.jsonl"

    def note_batch(given):  # when its updates have been made
        seen.batches.append(SimpleNamespace(**copy.deepcopy(with_lists(vars(given["batch"])))))

    def note_request(given):
        stub.made[0].order.append(f"request {given['training_step']}")

    def note_mini_batches(call, given):
        epochs = call()
        seen.mini_batches += itertools.chain(*epochs)
        return epochs

    def note_update(given):
        seen.rows.append(given["rows"])
        if len(seen.rows) == fails_at:
            raise RuntimeError("the power is gone")

    def note_step(call, given):
        norm, group = call(), given["optimizer"].param_groups[0]
        model = "policy" if isinstance(given["model"], script.PolicyModel) else "value"
        seen.rates[model].append(group["lr"])
        seen.decays.add(group["weight_decay"])
        seen.norms[model, 1 + len(seen.batches)].append(norm.item())
        return norm

    def note_program(command, **_):
        _, program, run_dir, *_ = command
        assert (run_dir / "args.json").exists()
        steps = len(read_json_lines(metrics)) if metrics.exists() else 0
        seen.programs.append((program.name, steps))

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        put = patch.setattr
        patch.setenv("PYTHONWARNINGS", "ignore")  # main() would, for good
        put(script, "VLLM", stub)
        if hasattr(script, "generation_thread"):
            stack.callback(catch_thread(script, put))
        if score is not None:
            options["reward_fn"] = "of the test"
            reward_in_this_process(script, score, put)
        hooks.before(script, "batch_metrics", note_batch, put)
        hooks.before(script, "make_request", note_request, put)
        hooks.around(script, "shuffle_into_mini_batches", note_mini_batches, put)
        hooks.before(script, "accumulate_gradients", note_update, put)
        hooks.around(script, "apply_gradients", note_step, put)
        seen.stdout = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        put("subprocess.run", note_program)  # no pictures
        put(sys, "argv", [name, *flags_of(options)])
        try:
            script.main(tyro.cli(script.Args))
        except (RuntimeError, AssertionError) as error:
            seen.error = error
    seen.vllm = stub.made[0] if stub.made else None
    if metrics.exists():
        seen.metrics = read_json_lines(metrics)
    return seen


def options_of(name, files, folder):
    options = {
        "dataset": files / "train.parquet",
        "model_name_or_path": REPO / "debug_assets" / "model",
        "output_dir": folder,
        "run_name": "run",
        "dtype": "float32",
        "response_length": 6,
        "total_episodes": STEPS * EPISODES,
        "local_rollout_batch_size": EPISODES // 4,
        "number_samples_per_prompt": 4,
        "local_mini_batch_size": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "beta": 0.3,
        "non_stop_penalty": True,
        "penalty_reward_value": -1.0,
        "min_response_length": 4,
        "temperature": 1.3,
    }
    if "ppo" in name:
        options |= {"gamma": 0.9, "lam": 0.8, "value_lam": 0.7, "value_learning_rate": 2e-3}
    return options
