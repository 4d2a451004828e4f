"""main() of a script with a stub in place of vLLM, in seconds.

Everything else is real: the debug model and data, the thread and the queues, the updates.
"""

import atexit
import contextlib
import copy
import importlib
import io
import multiprocessing
import queue
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from transformers import AutoModelForCausalLM

from helpers import PPO, REPO, hooks
from helpers.files import read_json_lines
from helpers.processes import flags_of
from helpers.rollouts import STOP

STEPS, EPISODES = 3, 16


def sample_digits(seed, args):
    """Token ids of a response, of which one in four has no end."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, args.response_length, (1,), generator=generator))
    digits = torch.randint(5, 15, (args.response_length,), generator=generator)
    if seed % 4 == 0:
        return digits.tolist()
    return [*digits[: size - 1].tolist(), STOP]


def report_logprobs(policy, inputs, mask, seed, is_old):
    """What a stub says that it sampled with, a row of numbers for each response.

    It is a little off; but for an older policy's batches, which need not agree: there it is far
    off.
    """
    with torch.no_grad():
        logprobs, _ = policy(inputs, mask.shape[1])
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(logprobs.shape, generator=generator)
    logprobs += error if is_old else 1e-4 * error
    sizes = mask.sum(1).tolist()
    return [row[:size].tolist() for row, size in zip(logprobs, sizes, strict=True)]


def make_stub(script):
    """A class for script.VLLM that samples digits with the weights that it was given last."""
    return make_small_stub(script) if hasattr(script.VLLM, "sample") else make_old_stub(script)


def make_small_stub(script):
    """For ppo_vllm_async.py."""

    class StubVLLM:
        made = []  # noqa: RUF012

        def __init__(self, placement, config, max_length, args):
            assert placement == (0, 1, ())
            self.args, self.max_length, self.policy_version = args, max_length, None
            self.policy = script.PolicyModel(AutoModelForCausalLM.from_config(config).eval(), args)
            self.synced, self.seeds, self.requests = [], [], 0
            self.order = []  # of weight syncs and requests
            self.made.append(self)

        def sync_weights(self, model, version):
            self.policy.model.load_state_dict(model.state_dict())
            self.policy_version = version
            self.synced.append(version)
            self.order.append(f"weights {version}")

        def sample(self, prompts, seeds, temperature, num_samples):
            self.seeds += seeds
            if not prompts:
                return []
            self.requests += 1
            assert len(prompts) % num_samples == 0
            rows = [sample_digits(seed, self.args) for seed in seeds]
            sequences = [(p.token_ids, row) for p, row in zip(prompts, rows, strict=True)]
            assert max(len(prompt + row) for prompt, row in sequences) <= self.max_length
            batch = script.collate(range(len(rows)), sequences, "cpu")
            is_old = self.args.async_mode and self.synced != [0]
            logprobs = report_logprobs(self.policy, batch.inputs, batch.mask, seeds[0], is_old)
            parts = zip(prompts, rows, logprobs, strict=True)
            return [script.Response(*part, stopped=part[1][-1] == STOP) for part in parts]

    return StubVLLM


def make_old_stub(script):
    """For the scripts that have not been rewritten."""

    class StubVLLM:
        made = []  # noqa: RUF012

        def __init__(self, gpus, index, count, args):
            self.index, self.count, self.args = index, count, args
            self.synced, self.seeds, self.requests = [], [], 0
            self.order = []  # of weight syncs and requests
            self.process = None
            self.made.append(self)

        def start(self, config, max_length):
            model = AutoModelForCausalLM.from_config(config).eval()
            self.policy = script.PolicyModel(model, self.args.temperature)
            # What it has answered is in a pipe, as VLLM's answers are. It never dies
            self.connection, self.its_end = multiprocessing.Pipe()
            self.process = SimpleNamespace(sentinel=self.its_end)

        def has_started(self, seconds):
            return True

        def stop(self):
            self.connection.close()
            self.its_end.close()

        def start_sync(self):
            self.weights = {}

        def load_weights(self, weights):
            self.weights |= {name: weight.clone() for name, weight in weights.items()}

        def finish_sync(self, version):
            self.policy.model.load_state_dict(self.weights)  # all of them, or it is an error
            self.synced.append(version)
            self.order.append(f"weights {version}")

        def send(self, function, *args):
            assert function is script.sample_responses
            self.its_end.send(self.sample_responses(*args))

        def has_answer(self, seconds):
            return self.connection.poll(seconds)

        def receive(self):
            return self.connection.recv()

        def sample_responses(self, prompt_ids, seeds, temperature, args):
            self.seeds += seeds
            if not prompt_ids:
                return [], [], self.synced[-1]
            self.requests += 1
            responses = [sample_digits(seed, self.args) for seed in seeds]
            inputs, mask = script.collate(prompt_ids, responses, 0, "cpu")
            is_old = getattr(self.args, "async_mode", False) and self.synced != [0]
            rows = report_logprobs(self.policy, inputs, mask, seeds[0], is_old)
            return responses, rows, self.synced[-1]

    return StubVLLM


class GenerationThread:
    """What main() of ppo_vllm_async.py starts: an error in it is raised by main().

    Without this it would end the process, and with it the tests; and the thread would wait for
    prompts for ever.
    """

    def __init__(self, script, put):
        self.ended, self.thread = threading.Event(), None
        hooks.around(script, "generation_thread", self.run, put=put)
        hooks.around(script, "receive_rollout", self.receive, put=put)
        put(script, "end_at_once", self.note)

    def run(self, call, given):
        self.thread, self.response_Q = threading.current_thread(), given["response_Q"]
        self.prompts_Q, given["prompts_Q"] = given["prompts_Q"], self
        call()

    def get(self):
        """A request, as from prompts_Q."""
        while not self.ended.is_set():
            with contextlib.suppress(queue.Empty):
                return self.prompts_Q.get(timeout=0.1)
        raise SystemExit

    def note(self, error):
        if not self.ended.is_set():
            self.response_Q.put(error)

    def receive(self, call, given):
        rollout = call()
        if isinstance(rollout, BaseException):
            raise rollout
        return rollout

    def end(self):
        self.ended.set()
        if self.thread is not None:
            self.thread.join()


def reward_in_this_process(script, score, put):
    """Has --reward_fn call score(data_source, response, ground_truth), without workers."""

    def reward_fn(data_source, response, ground_truth, extra_info):
        return score(data_source, response, ground_truth)

    def call_worker(workers, prompt, text, args):
        return script.call_reward_fn(args.reward_fn, prompt, text)

    put(script, "load_reward_fn", lambda name: reward_fn)
    put(script, "start_reward_worker", lambda name: None)
    put(script, "call_worker", call_worker)


def run_loop(name, files, folder, score=None, fails_at=None, **changes):
    """What was seen of main(); score(...) rewards it.

    files: the folder of few_prompts; fails_at: the update that does not come, but a RuntimeError;
    changes: to the options below.
    """
    script = importlib.import_module(name.removesuffix(".py"))
    stub = make_stub(script)
    options = options_of(name, files, folder) | changes
    run_dir = Path(options["output_dir"], "run")
    seen = SimpleNamespace(name=name, script=script, run_dir=run_dir)
    seen.batches, seen.mini_batches = [], []
    seen.rates = defaultdict(list)  # of the optimizer steps of each model
    seen.weights, seen.forwards = [], []  # the policy's before each update, in each update
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    is_small = not hasattr(script, "bad_input")

    def note_rows(rows, *_):
        seen.mini_batches.append(rows)
        if len(seen.mini_batches) == fails_at:
            raise RuntimeError("the power is gone")

    def note_request(call, given):
        for vllm in stub.made:  # none with the transformers backend
            vllm.order.append(f"request {given['training_step']}")
        return call()

    def note_policy(call, given):
        parameters = [p.detach().flatten() for p in given["policy"].parameters()]
        seen.weights.append(torch.cat(parameters))
        seen.forwards.append(0)
        return call()

    def note_forward(call, given):
        if torch.is_grad_enabled():
            seen.forwards[-1] += 1
        return call()

    def note_rate(optimizer):
        *_, last = optimizer.param_groups[0]["params"]
        model = "value" if last.shape[0] == 1 else "policy"
        seen.rates[model].append(optimizer.param_groups[0]["lr"])

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):  # main() has handlers of its own
            stack.callback(signal.signal, number, signal.getsignal(number))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(script, "VLLM", stub)
        if is_small:
            patch.setenv("PYTHONWARNINGS", "ignore")  # main() would, for good
            thread = GenerationThread(script, patch.setattr)
            stack.callback(thread.end)
            if score is not None:
                options["reward_fn"] = "of the test"
                reward_in_this_process(script, score, patch.setattr)
        else:
            stack.callback(atexit.unregister, script.print_resume_command)
            if score is not None:
                patch.setattr(script, "compute_score", score)
        hooks.with_each_batch(
            script,
            lambda batch, _: seen.batches.append(copy.deepcopy(batch)),
            put=patch.setattr,
        )
        hooks.before_update(script, note_rows, put=patch.setattr)
        hooks.around(script, "make_request", note_request, put=patch.setattr)
        hooks.around(script, "accumulate_gradients", note_policy, put=patch.setattr)
        hooks.around(script.PolicyModel, "forward", note_forward, put=patch.setattr)
        stack.enter_context(hooks.before_each_optimizer_step(note_rate))
        stack.enter_context(contextlib.redirect_stdout(output))
        patch.setattr("subprocess.run", lambda *_, **__: None)  # no pictures
        patch.setattr(sys, "argv", [name, *flags_of(options)])
        try:
            script.main(*([tyro.cli(script.Args)] if is_small else []))
        except RuntimeError as error:
            seen.error = error
    seen.vllm = stub.made[0] if stub.made else None
    seen.output = output.buffer.getvalue().decode()
    if seen.batches:
        seen.metrics = read_json_lines(seen.run_dir / "metrics.jsonl")
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
        "kl_estimator": "kl1",
        "non_stop_penalty": True,
        "penalty_reward_value": -1.0,
        "min_response_length": 4,
        "temperature": 1.3,
    }
    if name in PPO:
        options |= {"gamma": 0.9, "lam": 0.8, "value_lam": 0.7, "value_learning_rate": 2e-3}
    return options
