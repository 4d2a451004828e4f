"""The fork multiturn: ids that only grow, masks that leave out what was observed, an environment.

First without vLLM; then one run with it, at which all look.
"""

import sys
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import GRPO
from helpers.files import read_json_lines, write_text
from helpers.formulas import logprobs_and_entropies, reference_gradient
from helpers.rollouts import STOP, TINY, check_any_cut, one_of_ranks, tiny_language_model
from helpers.runs import VLLM_OPTIONS, weights_of_versions, without_clock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

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
def fork(import_fork):
    return import_fork("multiturn")


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
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
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


def test_what_cannot_have_turns_is_refused(fork):
    args = fork.Args(env_fn="environment.py:step", max_turns=2)
    with pytest.raises(ValueError, match="--env_fn and --max_turns need each other"):
        fork.fill_in(replace(args, max_turns=None), world_size=1)
    row = {"prompt": "21543=", "data_source": "debug/sorting"}
    row["reward_model"] = {"ground_truth": "12345"}
    with pytest.raises(ValueError, match="it is a string"):
        fork.read_prompt(row, "row 3", byte_tokenizer(CHATML), args, is_eval=False)

    model, tokenizer = tiny_language_model(), byte_tokenizer(CHATML)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.vocab_size = len(tokenizer)
    assert fork.find_stop_tokens(args, tokenizer, model) == (tokenizer.eos_token_id,)
    for template in (OPEN, NUMBERED, "?"):
        with pytest.raises(ValueError, match="must end a turn with a stop token"):
            fork.find_stop_tokens(args, byte_tokenizer(template), model)


# -------------------------------------------------------------------------------- a conversation


class ScriptedVLLM:
    """In place of VLLM: says what it is told to. It keeps what it was asked."""

    engine_index, num_engines, stop = 0, 1, STOP

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.asked = tokenizer, turns, []

    def say(self, response):
        """turns: {ground truth of a prompt: its turns}; an answer without <|end|> was cut."""
        text = self.turns[response.prompt.ground_truth][len(response.turns) // 2]
        ids = np.array(self.tokenizer(text)["input_ids"], np.int32)
        token_ids = np.concatenate([response.token_ids, ids])
        logprobs = np.full(response.num_sampled + len(ids), -0.5, np.float32)
        is_end = ids[-1] == self.stop
        return replace(response, token_ids=token_ids, logprobs=logprobs, stopped=is_end)

    def sample(self, responses, seeds, temperature):
        self.asked.append([(r.row.tolist(), s) for r, s in zip(responses, seeds, strict=True)])
        return [self.say(response) for response in responses]


@pytest.fixture
def converse(fork, tokenizer, monkeypatch):
    """converse({prompt: turns}, step, max_turns=2): the responses, and the engine."""

    def call(workers, response, args, call):
        return call(response)

    def run(turns, step=None, **options):
        monkeypatch.setattr(fork, "env_function", step)
        monkeypatch.setattr(fork, "call_worker", call)
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
    assert [len(turn) for turn in vllm.asked] == [3, 2, 1]
    for i, response in enumerate((one, two)):
        ends = [0, *(end for _, end in response.observed)]
        start = len(response.prompt.token_ids)
        asked = [turn[i][0] for turn in vllm.asked if i < len(turn)]
        assert asked == [response.row.tolist()[: start + end] for end in ends]
    seeds = [seed for turn in vllm.asked for _, seed in turn]
    assert seeds[:3] == [100, 101, 102] and len({*seeds}) == 6  # the script's own; and others


def test_observation_that_does_not_fit_cuts_the_response(converse):
    """3 tokens, an observation of 9, and the next turn needs one, which has to be cut."""
    for response_length, length in ((13, 13), (12, 3)):
        options = {"response_length": response_length, "max_turns": 2}
        (response,), _ = converse({"1": ["22<|end|>", "3"]}, lambda *_: "1234567", **options)
        assert len(response.token_ids) == length and not response.stopped
        assert response.is_sampled[-1]  # what a reward model reads


def test_end_token_that_the_policy_has_not_sampled_is_observed(converse, tokenizer, monkeypatch):
    """A turn may stop at another token than the chat template's."""
    monkeypatch.setattr(ScriptedVLLM, "stop", tokenizer.convert_tokens_to_ids("<|unknown|>"))
    (response,), _ = converse({"1": ["9<|unknown|>", "8"]}, lambda *_: "77", max_turns=2)
    assert shown(tokenizer, response) == "9<|unknown|>[<|end|><|user|>77<|assistant|>]8"


def test_markers_of_turns_need_not_be_special_to_be_refused(fork):
    tokenizer = byte_tokenizer(CHATML.replace("<|im_start|>", "[turn]"))
    tokenizer.add_tokens(["[turn]", "<tool>"])
    marker, tag = tokenizer.convert_tokens_to_ids(["[turn]", "<tool>"])
    assert {marker, tokenizer.eos_token_id} <= fork.turn_markers(tokenizer) - {tag}


def test_share_of_an_engine_is_its_own(converse, monkeypatch):
    monkeypatch.setattr(ScriptedVLLM, "engine_index", 1)
    monkeypatch.setattr(ScriptedVLLM, "num_engines", 2)
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

    monkeypatch.setattr(fork, "reward_function", score)
    assert fork.call_reward_fn(response).verifiable == 1


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


@pytest.mark.parametrize(
    "options",
    [
        {"importance_sampling_level": "sequence", "beta": 0.0},
        {"loss_aggregation": "sequence"},
        {"loss_aggregation": "constant"},
    ],
    ids=str,
)
def test_gradient_is_that_of_sampled_tokens_alone(fork, options):
    """However it is cut. Of what was observed a batch says rubbish, which nobody must read."""
    options = TINY | {"response_length": 40, "beta": 0.1, "tis_cap": 1.5} | options
    args = fork.Args(**options, cliprange=9.0, cliprange_higher=9.0)  # nothing is clipped away
    policy = fork.PolicyModel(tiny_language_model(), args).double()
    responses = list(made_up(fork))
    batch = fork.collate(responses, "cpu")
    mask = batch.mask.double()
    for response, row in zip(responses, mask.tolist(), strict=True):
        start = len(response.prompt.token_ids)
        observed = {start + i for span in response.observed for i in range(*span)}
        sampled = {*range(start, len(response.row))} - observed
        assert {i for i, is_in in enumerate(row) if is_in} == sampled
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    batch = replace(
        batch,
        mask=mask,
        loss_mask=mask,
        logprobs=torch.where(mask == 1, -2.9 + 0.1 * noise.double(), -1e3),
        ref_logprobs=torch.where(mask == 1, -3 + 0.1 * noise.double(), 1e3),
        sampler_logprobs=torch.where(mask == 1, -3.1, 1e3),
        advantages=torch.arange(-3.5, 4.5)[:, None].expand(mask.shape),
    )
    check_any_cut([policy], batch, args, *reference_gradient([policy], batch, args))


def test_run_of_one_turn_is_the_scripts_own_to_the_bit(fork, run_main, few_prompts):
    data = few_prompts / "test.parquet"
    own, forked = (run_main(name, eval_dataset=data) for name in (*GRPO, "grpo_multiturn.py"))
    for line in forked.metrics:
        assert {line.pop(name) for name in [*line] if name.endswith("/turns")} == {1.0}
    assert list(map(without_clock, forked.metrics)) == list(map(without_clock, own.metrics))
    for name in ("samples.jsonl", "rollouts.jsonl"):
        lines = read_json_lines(forked.run_dir / name)
        for line in lines:
            assert (line.pop("turns"), line.pop("observed")) == ([line["response"]], [])
        assert lines == read_json_lines(own.run_dir / name)
    path = "model/model.safetensors"
    assert (forked.run_dir / path).read_bytes() == (own.run_dir / path).read_bytes()


# -------------------------------------------------------------------------------------- with vLLM


@pytest.fixture(scope="module")
def one_rank(fork, run_script, small_eval, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    environment = write_text(folder / "environment.py", ENVIRONMENT)
    options = VLLM_OPTIONS | {"env_fn": f"{environment}:step", "max_turns": 4}
    options |= {"eval_dataset": small_eval, "response_length": 24, "learning_rate": 1e-3}
    options |= {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4}
    options |= dict.fromkeys(("gamma", "lam", "value_lam", "whiten_rewards"))  # of PPO
    env = {"PYTHONPATH": fork.__file__.rpartition("/")[0]}
    run = run_script(fork.__file__, folder, env=env, **options)
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def steps(one_rank):
    """Of each step its batch, and each row of it as [(whether it was sampled, token ids)]."""
    found = []
    for step in range(1, 5):
        batch = SimpleNamespace(**torch.load(one_rank.run_dir / "batches" / f"{step}.pt"))
        rows = []
        for mask, ids, length in zip(batch.mask, batch.input_ids, batch.lengths, strict=True):
            tokens = zip(mask[:length].tolist(), ids[:length].tolist(), strict=True)
            parts = groupby(tokens, key=lambda token: token[0] == 1)
            rows.append([(is_sampled, [i for _, i in part]) for is_sampled, part in parts])
        found.append((batch, rows))
    return found


@pytest.mark.slow
def test_tokens_that_vllm_saw_are_those_that_are_trained_on(one_rank, steps, tokenizer, assets):
    """Sampled ones have the log-probabilities of the version that sampled; others have none."""
    versions, counts = weights_of_versions(one_rank), set()
    for step, (batch, rows) in enumerate(steps, 1):
        model = AutoModelForCausalLM.from_pretrained(assets / "model")
        model.load_state_dict(versions[max(0, step - 2)])
        prompts, responses, masks = [], [], []
        for (_, prompt), *turns in rows:
            digits = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("=")
            assert prompt == tokenizer(f"<|user|>{digits}=<|assistant|>")["input_ids"]
            for i, (is_sampled, ids) in enumerate(turns):
                assert is_sampled == (i % 2 == 0)
                if is_sampled:
                    assert STOP not in ids[:-1]
                    assert ids[-1] == STOP or i == len(turns) - 1
                else:
                    told = "".join(sorted(digits))[i // 2 :]
                    assert ids == tokenizer(f"<|user|>{told}<|assistant|>")["input_ids"]
            counts.add(len(turns) // 2 + 1)
            prompts.append(prompt)
            responses.append([token for _, ids in turns for token in ids])
            assert len(responses[-1]) <= 24
            masks += [is_sampled for is_sampled, ids in turns for _ in ids]
        logprobs, _ = logprobs_and_entropies(model, prompts, responses, temperature=1.5)
        expected = torch.cat(logprobs)[torch.tensor(masks)]
        found = batch.sampler_logprobs[batch.mask == 1].double()
        assert (found - expected).abs().max() < 1e-4
        for name in ("sampler_logprobs", "logprobs", "ref_logprobs", "advantages", "loss_mask"):
            assert getattr(batch, name)[batch.mask == 0].abs().max() == 0, name
    assert counts == {1, 2, 3}


@pytest.mark.slow
def test_metrics_tell_of_turns(one_rank, steps):
    for line, (batch, rows) in zip(one_rank.metrics, steps, strict=True):
        # What failed is left out of the loss; what was cut has a penalty
        assert torch.equal(batch.loss_mask.amax(1), batch.has_score)
        expected = {
            "objective/turns": sum(len(row) // 2 for row in rows) / len(rows),
            "objective/sequence_lengths": batch.mask.sum().item() / len(rows),
            "objective/reward_failures": 1 - batch.has_score.mean().item(),
        }
        assert {name: line[name] for name in expected} == pytest.approx(expected)
