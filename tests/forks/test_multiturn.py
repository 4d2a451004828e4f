"""The fork multiturn: ids that only grow, masks that leave out what was observed, an environment.

First without vLLM; then one run with it, which all look at.
"""

import importlib
import math
import sys
from dataclasses import replace
from itertools import groupby, islice
from types import SimpleNamespace

import fork as forks
import inspect_run
import numpy as np
import pytest
import torch
from helpers import loops
from helpers.files import read_json_lines, write_text
from helpers.formulas import logprobs_and_entropies
from helpers.rollouts import STOP, one_of_ranks, tiny_language_model
from helpers.runs import VLLM_OPTIONS, weights_of_versions, without_clock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

NAME = "grpo_multiturn.py"
# Answers the first two turns, unless they end with one of three digits
ENVIRONMENT = """
def step(text, ground_truth, turn):
    if text.endswith("4"):
        return None
    if text.endswith("5"):
        raise OSError("out of paper")
    if text.endswith("6"):
        return 6
    return ground_truth[turn:] if turn < 2 else None
"""
# Turns as some models' templates write them: with a newline after the end token, which no policy
# samples; without the thoughts of earlier turns; with an end token after the last turn alone; and
# with numbers
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
FORGETFUL = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message['content'].split('</think>')[-1] }}",
)
OPEN = CHATML.replace(
    "<|im_end|>", "{% if loop.last or message['role'] == 'user' %}<|im_end|>{% endif %}"
)
NUMBERED = CHATML.replace("{{ message['role'] }}", "{{ message['role'] }} {{ loop.index }}")


@pytest.fixture(scope="module")
def folder(git, tmp_path_factory):
    """That of the fork and of its environment."""
    folder = tmp_path_factory.mktemp("fork")
    forks.write_fork("multiturn", folder / NAME)
    write_text(folder / "environment.py", ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def fork(folder):
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module("grpo_multiturn")
    sys.path.remove(str(folder))
    for name in ("grpo_multiturn", "environment"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


def byte_tokenizer(template):
    """A token a byte, but for two newlines or two spaces, which are one; and ChatML's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(c, c) for c in "ĊĠ"]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    options |= {"chat_template": template, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def ids_of(tokenizer, contents):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------------ token ids


@pytest.mark.parametrize("template", [CHATML, FORGETFUL], ids=["chatml", "forgetful"])
def test_observation_is_what_the_template_writes_after_a_turn(fork, template):
    tokenizer = byte_tokenizer(template)
    for observation in ("42", "", "\n\n 42\n", "</think> a turn"):
        end, *ids = fork.observation_ids(observation, tokenizer)
        assert end == tokenizer.eos_token_id
        assert tokenizer.decode(ids).startswith("\n<|im_start|>user\n")
        for earlier in (["Hi"], ["Hi", "<think>Hm.</think>Hello", "And?"]):
            whole = ids_of(tokenizer, [*earlier, "<think>So.</think>So.\n", observation])
            assert whole[-len(ids) - 1 :] == [end, *ids]


def test_what_cannot_have_turns_is_refused(fork, assets):
    args = fork.Args(env_fn="environment.py:step", max_turns=2)
    for changes in ({"env_fn": None}, {"max_turns": None}, {"max_turns": 0}):
        with pytest.raises(ValueError, match="--env_fn and --max_turns need each other"):
            fork.fill_in(replace(args, **changes), world_size=1)
    row = {"prompt": "21543=", "data_source": "debug/sorting"}
    row["reward_model"] = {"ground_truth": "12345"}
    with pytest.raises(ValueError, match="it is a string"):
        fork.read_prompt(row, "row 3", byte_tokenizer(CHATML), args, is_eval=False)

    model = tiny_language_model()
    tokenizer = byte_tokenizer(CHATML)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.vocab_size = len(tokenizer)
    assert fork.find_stop_tokens(args, tokenizer, model) == (tokenizer.eos_token_id,)
    for template in (OPEN, NUMBERED, "?"):
        tokenizer = byte_tokenizer(template)
        with pytest.raises(ValueError, match="must end a turn with a stop token"):
            fork.find_stop_tokens(args, tokenizer, model)
    fork.find_stop_tokens(replace(args, env_fn=None), tokenizer, model)  # it has one turn


# -------------------------------------------------------------------------------- a conversation


class ScriptedVLLM:
    """In place of VLLM: says what it is told to. It keeps what it was asked."""

    index, count, stop = 0, 1, STOP

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.asked = tokenizer, turns, []

    def say(self, response):
        """turns: {ground truth of a prompt: its turns}; an answer without <|end|> was cut."""
        text = self.turns[response.prompt.ground_truth][len(response.turns) // 2]
        ids = np.array(self.tokenizer(text)["input_ids"], np.int32)
        token_ids = np.concatenate([response.token_ids, ids])
        logprobs = np.full(response.num_sampled + len(ids), -0.5, np.float32)
        return replace(
            response, token_ids=token_ids, logprobs=logprobs, stopped=ids[-1] == self.stop
        )

    def sample(self, responses, seeds, temperature):
        self.asked.append([(r.row.tolist(), s) for r, s in zip(responses, seeds, strict=True)])
        return [self.say(response) for response in responses]


@pytest.fixture
def converse(fork, tokenizer, monkeypatch):
    """converse({prompt: turns}, step, max_turns=2): the responses, and the engine."""

    def run(turns, step=None, **options):
        monkeypatch.setattr(fork, "load_reward_fn", lambda name: step)
        monkeypatch.setattr(
            fork, "call_worker", lambda workers, response, args, call: call(args, response)
        )
        defaults = {"env_fn": "here", "max_turns": 3, "response_length": 40, "reward_workers": 2}
        args = fork.Args(**defaults | {"stop_token_ids": (STOP,)} | options)
        vllm = ScriptedVLLM(tokenizer, turns)
        prompts = [
            fork.Prompt("", "", tokenizer(f"{text}=")["input_ids"], "debug/sorting", text, None)
            for text in turns
        ]
        seeds = range(100, 100 + len(prompts))
        return fork.take_turns(vllm, None, tokenizer, prompts, seeds, 1.0, args), vllm

    return run


def shown(tokenizer, response):
    """A response as text, what was observed in brackets."""
    text, start = "", 0
    for first, end in response.observed:
        text += tokenizer.decode(response.token_ids[start:first])
        text += f"[{tokenizer.decode(response.token_ids[first:end])}]"
        start = end
    return text + tokenizer.decode(response.token_ids[start:])


def test_turns_and_observations_follow_each_other(fork, converse, tokenizer):
    """Three are asked, of which one is answered twice, one once, and one was cut."""
    seen = []

    def step(text, ground_truth, turn):
        seen.append((text, ground_truth, turn))
        return None if text.endswith("0") else f"{text}{turn}"

    turns = {
        "1": ["11<|end|>", "12<|end|>", "13<|end|>"],
        "2": ["21<|end|>", "20<|end|>"],
        "3": ["31"],
    }
    (one, two, three), vllm = converse(turns, step)
    assert shown(tokenizer, one) == (
        "11<|end|>[<|user|>110<|assistant|>]12<|end|>[<|user|>121<|assistant|>]13<|end|>"
    )
    assert shown(tokenizer, two) == "21<|end|>[<|user|>210<|assistant|>]20<|end|>"
    assert shown(tokenizer, three) == "31"
    assert [r.turns for r in (one, two)] == [["11", "110", "12", "121", "13"], ["21", "210", "20"]]
    assert [r.text for r in (one, two, three)] == ["13", "20", "31"]  # which the grader sees
    assert [r.stopped for r in (one, two, three)] == [True, True, False]
    assert [r.num_sampled for r in (one, two, three)] == [9, 6, 2]
    # Of the last turn nobody is asked, nor of one that was cut
    assert sorted(seen) == [("11", "1", 0), ("12", "1", 1), ("20", "2", 1), ("21", "2", 0)]

    # What was asked for grows: token by token what has been there, and what was observed
    first, second, third = vllm.asked
    assert [len(turn) for turn in vllm.asked] == [3, 2, 1]
    for response, *asked in ((one, first[0], second[0], third[0]), (two, first[1], second[1])):
        row = response.row.tolist()
        ends = [0, *(end for _, end in response.observed)]
        assert [ids for ids, _ in asked] == [
            row[: len(response.prompt.token_ids) + end] for end in ends
        ]
    assert [seed for _, seed in first] == [100, 101, 102]  # the script's own
    assert len({seed for turn in vllm.asked for _, seed in turn}) == 6


def test_observation_that_does_not_fit_cuts_the_response(converse):
    """3 tokens, an observation of 9, and the next turn needs one, which has to be cut."""
    for response_length, length in ((13, 13), (12, 3)):
        options = {"response_length": response_length, "max_turns": 2}
        (response,), _ = converse({"1": ["22<|end|>", "3"]}, lambda *_: "1234567", **options)
        assert len(response.token_ids) == length and not response.stopped
        assert response.is_sampled[-1]  # what a reward model reads


def test_end_token_that_the_policy_has_not_sampled_is_observed(
    fork, converse, tokenizer, monkeypatch
):
    """A turn may stop at another token than the chat template's."""
    other = tokenizer.convert_tokens_to_ids("<|unknown|>")
    monkeypatch.setattr(ScriptedVLLM, "stop", other)
    (response,), _ = converse({"1": ["9<|unknown|>", "8"]}, lambda *_: "77", max_turns=2)
    observed = tokenizer.decode(response.token_ids[slice(*response.observed[0])])
    assert observed == "<|end|><|user|>77<|assistant|>"


def test_markers_of_turns_need_not_be_special_to_be_refused(fork):
    tokenizer = byte_tokenizer(CHATML.replace("<|im_start|>", "[turn]"))
    tokenizer.add_tokens(["[turn]", "<tool>"])
    marker, tag = tokenizer.convert_tokens_to_ids(["[turn]", "<tool>"])
    assert {marker, tokenizer.eos_token_id} <= fork.turn_markers(tokenizer)
    assert tag not in fork.turn_markers(tokenizer)


def test_share_of_an_engine_is_its_own(converse, monkeypatch):
    monkeypatch.setattr(ScriptedVLLM, "index", 1)
    monkeypatch.setattr(ScriptedVLLM, "count", 2)
    responses, vllm = converse({i: ["5<|end|>"] for i in "0123"}, max_turns=1)
    assert [response.prompt.ground_truth for response in responses] == ["2", "3"]
    assert [seed for _, seed in vllm.asked[0]] == [102, 103]


@pytest.mark.parametrize(
    "options", [{}, {"apply_verifiable_reward": False, "add_r1_style_format_reward": True}]
)
def test_environment_that_fails_costs_its_response_alone(fork, converse, options):
    """It exits, raises, answers nonsense, or forges a turn. Whatever scores, there is no score."""
    answers = {"3": 5, "4": b"6", "5": "1<|end|><|user|>2", "6": "\ud800"}
    told = {"1": "enough", "2": "out of paper", "3": "no string: 5", "4": "no string: b'6'"}
    told |= {"5": "special tokens", "6": "surrogates not allowed"}

    def step(text, ground_truth, turn):
        if text == "1":
            sys.exit("enough")
        if text == "2":
            raise OSError("out of paper")
        return answers.get(text, "89")

    turns = {i: [f"{i}<|end|>", "0<|end|>"] for i in "0123456"}
    (right, *failed), _ = converse(turns, step, max_turns=2)
    assert right.failure is None and right.turns == ["0", "89", "0"]
    args = fork.Args(env_fn="here", reward_workers=2, **options)
    graded = fork.grade_responses(failed, None, args)  # which asks no grader
    for response in fork.score_responses(one_of_ranks(0, 1), None, graded, args):
        assert told[response.prompt.ground_truth] in response.failure
        assert response.observed == [] and response.score is response.verifiable is None


def test_grader_sees_the_last_turn_and_all_if_it_asks(fork, converse, monkeypatch):
    (response,), _ = converse({"1": ["52<|end|>", "3<|end|>"]}, lambda *_: "77", max_turns=2)

    def score(data_source, response, ground_truth, extra_info):
        assert response == "3"
        assert extra_info == {"num_tokens": 5, "stopped": True, "turns": ["52", "77", "3"]}
        return 1.0

    monkeypatch.setattr(fork, "load_reward_fn", lambda name: score)
    assert fork.call_reward_fn(fork.Args(reward_fn="here"), response).verifiable == 1


# ------------------------------------------------------------------------------------------ masks


def made_up(fork):
    """Eight responses of up to three turns, with made-up tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(most):
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(2, 20, (count,), generator=generator).tolist()

    for row in range(8):
        token_ids, observed = ids(5), []
        for _ in range(row % 3):
            observation = ids(4)
            observed.append([len(token_ids), len(token_ids) + len(observation)])
            token_ids += [*observation, *ids(5)]
        prompt = fork.Prompt("", "", ids(4), None, None, None)
        response = fork.Response(prompt, np.array(token_ids), observed=observed, score=1.0)
        yield replace(response, logprobs=-np.ones(response.num_sampled, np.float32))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_gradient_of_observed_tokens_is_exactly_zero(fork, aggregation):
    """Where the model says what is next, and the next token was observed."""
    options = {"dtype": "float32", "response_length": 40, "loss_aggregation": aggregation}
    options |= {"cliprange": 9.0, "cliprange_higher": 9.0}  # no gradient is clipped away
    options |= {"importance_sampling_level": "sequence" if aggregation == "token" else "token"}
    args = fork.Args(**options, beta=0.0 if aggregation == "token" else 0.1)
    policy = fork.PolicyModel(tiny_language_model(), args)
    responses = sorted(made_up(fork), key=lambda response: len(response.row))  # as passes sort
    batch = fork.collate(responses, "cpu")
    mask = batch.mask
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    batch = replace(
        batch,
        # Rubbish where it must not be read
        logprobs=torch.where(mask == 1, -2.9 + 0.1 * noise, -1e3),
        ref_logprobs=torch.where(mask == 1, -3 + 0.1 * noise, 1e3),
        advantages=torch.arange(-3.5, 4.5)[:, None].expand(mask.shape),
    )
    seen = []

    def note(model, given, output):
        seen.append(output.last_hidden_state)
        seen[-1].retain_grad()

    policy.model.base_model.register_forward_hook(note)
    sums, _ = fork.accumulate_gradients(
        one_of_ranks(0, 1), policy, batch, list(range(len(mask))), False, args
    )
    for response, of_row in zip(responses, seen[0].grad.abs().amax(-1).tolist(), strict=True):
        start, end = len(response.prompt.token_ids), len(response.row)
        sampled = set(range(start, end))
        for first, last in response.observed:
            sampled -= set(range(start + first, start + last))
        assert {i + 1 for i, size in enumerate(of_row) if size > 0} == sampled
    assert sums["tokens"] == sum(response.num_sampled for response in responses)
    assert all(math.isfinite(value) for value in sums.values())


# ------------------------------------------------------------------------------ the run as a whole


def run_with_stub(fork, files, folder, monkeypatch, **options):
    """loops.run_loop of the fork, whose engine is asked for turns, not for responses."""
    make_stub = loops.make_stub

    def make(script):
        stub = make_stub(script)
        sample = stub.sample
        if script is fork:
            stub.sample = lambda self, responses, seeds, temperature: sample(
                self, [response.prompt for response in responses], [*seeds], temperature
            )
        return stub

    monkeypatch.setattr(loops, "make_stub", make)
    name = NAME if fork else "grpo_vllm_async.py"
    return loops.run_loop(name, files, folder, eval_dataset=files / "test.parquet", **options)


def test_run_of_one_turn_is_the_scripts_own_to_the_bit(fork, few_prompts, tmp_path, monkeypatch):
    own = run_with_stub(None, few_prompts, tmp_path / "own", monkeypatch)
    forked = run_with_stub(fork, few_prompts, tmp_path / "fork", monkeypatch)
    for line, expected in zip(forked.metrics, own.metrics, strict=True):
        line = without_clock(line)
        assert {line.pop(name) for name in [*line] if name.endswith("/turns")} == {1.0}
        assert line == without_clock(expected)
    for name in ("samples.jsonl", "rollouts.jsonl"):
        lines = read_json_lines(forked.run_dir / name)
        for line in lines:
            assert (line.pop("turns"), line.pop("observed")) == ([line["response"]], [])
        assert lines == read_json_lines(own.run_dir / name)
    path = "model/model.safetensors"
    assert (forked.run_dir / path).read_bytes() == (own.run_dir / path).read_bytes()


def test_turns_are_shown():
    row = {"score": 1.0, "stopped": True, "length": 3, "prompt": "1=", "ground_truth": "2"}
    row |= {"training_step": 1, "policy_version": 0, "response": "9", "turns": ["7", "8", "9"]}
    padding = [*inspect_run.show_responses([row], 8)][-2]
    assert padding.renderable == "7 [8] 9"
    *_, last = inspect_run.describe_samples([row, row | {"policy_version": 4}])
    assert last == "  after, score 1: 7 [8] 9"


# -------------------------------------------------------------------------------------- with vLLM


@pytest.fixture(scope="module")
def one_rank(folder, run_script, small_eval, tmp_path_factory):
    options = VLLM_OPTIONS | {"env_fn": folder / "environment.py:step", "max_turns": 4}
    options |= {"eval_dataset": small_eval, "response_length": 24, "learning_rate": 1e-3}
    options |= {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4}
    options |= dict.fromkeys(("gamma", "lam", "value_lam", "whiten_rewards"))  # of PPO
    env = {"PYTHONPATH": str(folder)}
    run = run_script(folder / NAME, tmp_path_factory.mktemp("run"), env=env, **options)
    assert run.returncode == 0, run.output
    return run


def batch_of(run, step):
    return SimpleNamespace(**torch.load(run.run_dir / "batches" / f"{step}.pt"))


def parts_of(batch, row):
    """A row as [(whether the policy sampled it, token ids)], the prompt first."""
    tokens = zip(batch.mask[row].tolist(), batch.input_ids[row].tolist(), strict=True)
    parts = groupby(islice(tokens, int(batch.lengths[row])), key=lambda token: token[0])
    return [(sampled == 1, [token for _, token in part]) for sampled, part in parts]


@pytest.mark.slow
def test_tokens_that_vllm_saw_are_those_that_are_trained_on(one_rank, fork, tokenizer, assets):
    """Sampled ones have the log-probabilities of the version that sampled; others have none."""
    versions = weights_of_versions(one_rank)
    counts = set()
    for step in range(1, 5):
        batch = batch_of(one_rank, step)
        model = AutoModelForCausalLM.from_pretrained(assets / "model")
        model.load_state_dict(versions[max(0, step - 2)])
        prompts, responses, masks = [], [], []
        for row in range(len(batch.lengths)):
            (_, prompt), *turns = parts_of(batch, row)
            digits = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("=")
            truth = "".join(sorted(digits))
            assert prompt == tokenizer(f"<|user|>{digits}=<|assistant|>")["input_ids"]
            for i, (is_sampled, ids) in enumerate(turns):
                assert is_sampled == (i % 2 == 0)
                if is_sampled:
                    assert STOP not in ids[:-1]
                    assert ids[-1] == STOP or i == len(turns) - 1
                else:
                    expected = f"<|user|>{truth[i // 2 :]}<|assistant|>"
                    assert ids == tokenizer(expected)["input_ids"]
            assert sum(len(ids) for _, ids in turns) <= 24
            counts.add(len(turns) // 2 + 1)
            prompts.append(prompt)
            responses.append([token for _, ids in turns for token in ids])
            masks += [is_sampled for is_sampled, ids in turns for _ in ids]
        logprobs, _ = logprobs_and_entropies(model, prompts, responses, temperature=1.5)
        expected = torch.cat(logprobs)[torch.tensor(masks)]
        found = batch.sampler_logprobs[batch.mask == 1].double()
        assert (found - expected).abs().max() < 1e-4
        for name in ("sampler_logprobs", "logprobs", "ref_logprobs", "advantages", "loss_mask"):
            assert getattr(batch, name)[batch.mask == 0].abs().max() == 0, name
    assert counts == {1, 2, 3}


@pytest.mark.slow
def test_metrics_and_files_tell_of_turns(one_rank, tokenizer):
    for step, line in enumerate(one_rank.metrics, 1):
        batch = batch_of(one_rank, step)
        parts = [parts_of(batch, row) for row in range(len(batch.lengths))]
        failed = batch.has_score == 0  # which is left out of the loss; what was cut has a penalty
        assert torch.equal(batch.loss_mask.amax(1), batch.has_score)
        expected = {
            "objective/turns": sum(len(row) // 2 for row in parts) / len(parts),
            "objective/sequence_lengths": batch.mask.sum().item() / len(parts),
            "objective/reward_failures": failed.float().mean().item(),
        }
        assert {name: line[name] for name in expected} == pytest.approx(expected)
    for name in ("samples.jsonl", "rollouts.jsonl"):
        lines = read_json_lines(one_rank.run_dir / name)
        assert max(len(line["observed"]) for line in lines) == 2
        for line in lines:
            assert line["response"] in line["turns"][-2:]  # the last answer may not have fitted
            if "token_ids" in line:
                texts = [tokenizer.decode(line["token_ids"][a:b]) for a, b in line["observed"]]
                told = [f"<|user|>{text}<|assistant|>" for text in line["turns"][1::2]]
                assert texts == told[: len(texts)]
