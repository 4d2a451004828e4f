"""Evaluates a run's saved model on held-out prompts: several samples a prompt,
with intervals.

    # as the run evaluates itself: one greedy answer to each of its held-out prompts
    python scripts/evaluate.py output/RUN
    # eight answers to each prompt, at the temperature of training: mean and pass@k
    python scripts/evaluate.py output/RUN --samples 8
    # the same of the model before training, to compare with
    python scripts/evaluate.py output/RUN --samples 8 --model debug_assets/model

Prompts, lengths, stop tokens and rewards are those of the run, by its
args.json. Paths there that are not absolute count from where you stand, so
start it where the run was started. vLLM has one GPU, or the CPU where there is
none.

"Right" means a verifiable score of 1 or more, as in the run's metrics. pass@k
is the share of prompts of which one of k answers is right, by the unbiased
estimator of arXiv 2107.03374. A response whose reward failed has no score, and
a prompt with fewer than k scores no pass@k.

An interval is of 95%, and says how far other prompts of the same kind might
have moved the figure; what another seed of training would have given is not in
it. The prompts are its units, for samples of one prompt are alike. Fewer than
30 prompts are too few.

It writes RUN/evaluations/NAME/responses.jsonl, a line a response, and
evaluation.json. NAME says what was asked, how many prompts and how many answers
to each, and ends in a hash of all settings. What is there is not made again.
"""

import argparse
import hashlib
import json
import math
import os
import queue
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

# Flags of the scripts that this program may replace
REPLACED = (
    "eval_dataset",
    "eval_dataset_config",
    "eval_dataset_split",
    "num_eval_prompts",
    "eval_temperature",
)
REPLACED += ("response_length", "reward_fn", "seed")
Z = 1.96  # 95% of a normal distribution are so many standard deviations about its mean


# ---------------------------------------------------------------------------------------- figures


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The probability that k of a prompt's samples, drawn at random, have a right one.

    >>> from itertools import combinations
    >>> draws = list(combinations([True, True, False, False, False], 3))
    >>> pass_at_k(5, 2, 3) == sum(map(any, draws)) / len(draws) == 0.9
    True
    >>> pass_at_k(5, 3, 3)  # no draw has wrong ones alone
    1.0
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate_mean(values: list[float]) -> dict:
    """The mean of the prompts' values, plus and minus 1.96 standard errors; none of one prompt.

    >>> estimate_mean([1.0, 2.0, 3.0, 6.0])  # their variance is 14 / 3
    {'mean': 3.0, 'low': 0.883, 'high': 5.117}
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return {"mean": mean}
    error = Z * statistics.stdev(values) / math.sqrt(len(values))
    return rounded(mean, mean - error, mean + error)


def estimate_rate(values: list[float]) -> dict:
    """The mean of the prompts' rates, each from 0 to 1, with Wilson's interval.

    It stays between 0 and 1, and is no point where every answer was right. Where all rates are 0 or
    1 its ends are the p with |mean - p| = 1.96 sqrt(p (1 - p) / n). Other rates spread less: their
    n is as many answers as would give the mean this variance.

    >>> estimate_rate([1.0] * 15 + [0.0] * 5)
    {'mean': 0.75, 'low': 0.5313, 'high': 0.8881}
    >>> [round(abs(0.75 - p) / math.sqrt(p * (1 - p) / 20), 2) for p in (0.5313, 0.8881)]
    [1.96, 1.96]
    >>> estimate_rate([0.7, 0.8] * 10)
    {'mean': 0.75, 'low': 0.7275, 'high': 0.7713}
    >>> estimate_rate([1.0] * 20)
    {'mean': 1.0, 'low': 0.8389, 'high': 1.0}
    """
    mean = statistics.fmean(values)
    variance, most = statistics.pvariance(values), mean * (1 - mean)
    # Of prompts that are all alike nothing is known about the spread
    count = len(values) * (most / variance if variance > 0 else 1)
    center = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
    width = Z * math.sqrt(most / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return rounded(mean, center - width, center + width)


def rounded(mean, low, high):
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}


def summarize(rows: list[dict]) -> dict:
    """The figures of some lines of responses.jsonl; without those that no response has."""
    by_prompt = defaultdict(list)
    for row in rows:
        by_prompt[row["prompt_index"]].append(row)
    groups = list(by_prompt.values())

    def known(name):
        """The values of each prompt's responses, without those that have none."""
        found = [[row.get(name) for row in group] for group in groups]
        values = [[value for value in group if value is not None] for group in found]
        return [group for group in values if group]

    values = {}
    for name in ("score", "verifiable_score", "reward_model_score"):
        values[name] = [statistics.fmean(group) for group in known(name)]
    right = [[score >= 1 for score in group] for group in known("verifiable_score")]
    k = 1
    while k <= max(map(len, groups)):
        values[f"pass@{k}"] = [pass_at_k(len(g), sum(g), k) for g in right if len(g) >= k]
        k *= 2
    values["length"] = [statistics.fmean(group) for group in known("length")]
    values["stop_rate"] = [statistics.fmean(group) for group in known("stopped")]
    is_rate = {"stop_rate", *(name for name in values if name.startswith("pass@"))}
    figures = {
        name: (estimate_rate if name in is_rate else estimate_mean)(of_prompts)
        for name, of_prompts in values.items()
        if of_prompts
    }
    failures = sum(row["failure"] is not None for row in rows)
    counts = {"prompts": len(groups), "responses": len(rows), "reward_failures": failures}
    return counts | figures


def summarize_sources(rows: list[dict]) -> dict:
    """{"all": figures}, and where there are several data sources those of each."""
    sources = sorted({str(row["data_source"]) for row in rows})
    results = {"all": summarize(rows)}
    for source in sources if len(sources) > 1 else []:
        results[source] = summarize([row for row in rows if str(row["data_source"]) == source])
    return results


def show(evaluation: dict):
    """Prints an evaluation.json."""
    settings, results = evaluation["settings"], evaluation["results"]
    samples, temperature = settings["samples"], settings["eval_temperature"]
    each = f"{samples} answers to each prompt" if samples > 1 else "an answer to each prompt"
    print(f"\n{evaluation['model']} on {settings['eval_dataset']}")
    print(f"{each}, at temperature {temperature:g}")
    for source, figures in results.items():
        about = f"{figures['prompts']:,} prompts, {figures['responses']:,} responses"
        if figures["reward_failures"]:
            about += f", the reward failed on {figures['reward_failures']}"
        print(f"\n{source}: {about}\n{'':<18}{'mean':>9}    95% interval")
        for name, figure in figures.items():
            is_same = name == "verifiable_score" and figure == figures.get("score")
            if isinstance(figure, dict) and not is_same:
                mean, *interval = (f"{value:.4g}" for value in figure.values())
                print(f"{name:<18}{mean:>9}    {' to '.join(interval)}".rstrip())


# ---------------------------------------------------------------------------------------- answers


def read_arguments(script, options):
    """The run's Args with what the options replace.

    Flags that only another of the scripts has are left out. All else on one process and one GPU.
    """
    saved = json.loads((options.run / "args.json").read_text())
    names = {field.name for field in fields(script.Args)}
    args = script.Args(**{name: saved[name] for name in names & set(saved)})
    args = replace(
        args,
        world_size=1,
        local_world_size=1,
        vllm_gpus=(),
        vllm_tensor_parallel_size=1,
        vllm_gpu_memory_utilization=0.9,
        reward_workers=min(8, os.cpu_count()),
    )
    if (options.run / "model").is_dir():
        args = replace(args, tokenizer_name_or_path=str(options.run / "model"), chat_template=None)
    given = {name: getattr(options, name) for name in REPLACED}
    args = replace(args, **{name: value for name, value in given.items() if value is not None})
    # Several greedy answers would be one
    if options.samples > 1 and args.eval_temperature == 0:
        args = replace(args, eval_temperature=args.temperature)
    return args


def settings_of(args, options, num_prompts):
    """What an evaluation is known by."""
    config = (options.model or options.run / "model") / "config.json"
    settings = {
        "model": str(options.model or "trained"),  # and not by the place of the run, which may move
        "model_saved": round(config.stat().st_mtime, 3),  # a resumed run saves another
        "prompts": num_prompts,
        "samples": options.samples,
    }
    return settings | {name: getattr(args, name) for name in REPLACED if name != "num_eval_prompts"}


def name_of(settings):
    """The name of the folder of an evaluation."""
    model = "-".join(Path(settings["model"]).parts[-2:])  # of a folder `model` it says whose
    dataset = Path(settings["eval_dataset"]).stem
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    size = f"{settings['prompts']}x{settings['samples']}"
    return f"{model}_{dataset}_{size}_t{settings['eval_temperature']:g}_{digest}"


def load_held_out(script, args, options):
    """The tokenizer and the held-out Prompts, drawn as the run draws them."""
    tokenizer = script.load_tokenizer(args)
    if options.model:
        own = script.AutoTokenizer.from_pretrained(options.model)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{options.model} has other tokens than the run's model")
    prompts = script.load_prompts(
        args.eval_dataset,
        args.eval_dataset_config,
        args.eval_dataset_split,
        tokenizer,
        args,
        is_eval=True,
    )
    if 0 < args.num_eval_prompts < len(prompts):
        drawn = script.draw_prompts(len(prompts), 0, args.num_eval_prompts, seed=0)
        prompts = [prompts[i] for i in drawn]
    return tokenizer, prompts


def answer_prompts(script, tokenizer, prompts, args, options):
    """The Responses to some Prompts, the samples of a prompt side by side, with their scores."""
    model_path = str(options.model or options.run / "model")
    gpus = (0,) if script.torch.cuda.device_count() else ()
    from safetensors.torch import load_file

    adapter = options.run / "adapter" / "adapter_model.safetensors"
    if options.model:
        args = replace(args, lora_rank=0)
    elif args.lora_rank:  # rounded to bfloat16 the merged model would lose a part of what it learnt
        model_path = args.model_name_or_path
    # Only its weights are needed, which vLLM gets one by one: on a GPU there is never a second copy
    weights_alone = replace(args, model_name_or_path=model_path, attn_implementation="eager")
    model = script.load_model(script.AutoModelForCausalLM, model_path, weights_alone, trained=False)
    repeated = [prompt for prompt in prompts for _ in range(options.samples)]
    seeds = [
        script.stable_hash(args.seed, "evaluation", index, sample)
        for index in range(len(prompts))
        for sample in range(options.samples)
    ]
    workers = queue.Queue()
    try:
        if args.reward_fn:
            for _ in range(args.reward_workers):
                workers.put(script.start_reward_worker(args.reward_fn))
        print("Starting vLLM ...", flush=True)
        max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
        vllm = script.VLLM((0, 1, gpus), model.config, max_length, args)
        device = "cuda" if gpus else "cpu"
        # As the scripts send them: a tied head as well on a CPU, once on a GPU
        parameters = model.named_parameters(remove_duplicate=bool(gpus))
        weights = ((name, weight.data.to(device)) for name, weight in parameters)
        if args.lora_rank:  # then vLLM has the model
            weights = (
                (name.removeprefix("base_model.model."), weight)
                for name, weight in load_file(adapter).items()
            )
        vllm.sync_weights(weights, 0)
        print(f"Sampling {len(repeated):,} responses ...", flush=True)
        responses = vllm.sample(repeated, seeds, args.eval_temperature)
        responses = script.grade_responses(responses, tokenizer, workers, args)
    finally:
        script.end_children()
    accelerator = script.Accelerator(mixed_precision="no")
    reward_model = None
    if script.uses_reward_model(args):
        reward_model = script.load_value_or_reward_model(
            accelerator, args.reward_model_path, args, trained=False
        )
    return script.score_responses(accelerator, reward_model, responses, args, is_eval=True)


def describe(response, number, num_samples):
    """A response as a line of responses.jsonl."""
    index, sample = divmod(number, num_samples)
    return {
        "prompt_index": index,
        "sample": sample,
        "prompt": response.prompt.text,
        "response": response.text,
        "score": response.score,
        "verifiable_score": response.verifiable,
        "reward_model_score": response.model_score,
        "failure": response.failure,
        "ground_truth": response.prompt.ground_truth,
        "data_source": response.prompt.data_source,
        "length": len(response.token_ids),
        "stopped": response.stopped,
    }


def evaluate(options, fail):
    """Makes the evaluation, or shows it where it exists.

    fail: parser.error, which ends this program with a line.
    """
    # Not before the command line is known to be right, for it takes seconds
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import grpo_vllm_async as script  # its functions are those of the other scripts, word for word

    script.transformers.utils.logging.set_verbosity_error()
    script.transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of vLLM's process
    args = read_arguments(script, options)
    if args.eval_dataset is None:
        fail("the run has no --eval_dataset; say --dataset")
    if args.reward_fn and not os.path.isfile(args.reward_fn.rpartition(":")[0]):
        fail(f"--reward_fn {args.reward_fn}: there is no such file; say path/to/file.py:function")
    try:
        tokenizer, prompts = load_held_out(script, args, options)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        fail(" ".join([str(error), *getattr(error, "__notes__", [])]))
    settings = settings_of(args, options, len(prompts))
    folder = options.run / "evaluations" / name_of(settings)
    path = folder / "evaluation.json"
    if path.exists():
        show(json.loads(path.read_text()))
        print(f"\nThis evaluation was there already: {folder}. Remove it to make it again.")
        return

    started_at = time.time()
    responses = answer_prompts(script, tokenizer, prompts, args, options)
    rows = [describe(response, i, options.samples) for i, response in enumerate(responses)]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "responses.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    evaluation = {
        "model": str(options.model or options.run / "model"),
        "settings": settings,
        "results": summarize_sources(rows),
        "seconds": round(time.time() - started_at, 1),
    }
    path.write_text(json.dumps(evaluation, indent=2))
    show(evaluation)
    print(f"\nAll responses and figures: {folder}")


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends this, whatever it waits for
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", type=lambda path: Path(path).expanduser(), help="folder of the run")
    add("--samples", type=int, default=1, help="answers to each prompt (default 1)")
    temperature = "default: the run's --eval_temperature; where that is 0 and there are several "
    temperature += "samples, the run's --temperature"
    add("--temperature", dest="eval_temperature", type=float, help=temperature)
    dataset = "held-out prompts; default: the run's"
    add("--dataset", dest="eval_dataset", type=os.path.expanduser, help=dataset)
    split = "their split, when they are on the hub; default: the run's"
    add("--dataset_split", dest="eval_dataset_split", help=split)
    add("--dataset_config", dest="eval_dataset_config", help="their configuration, likewise")
    prompts = "how many of them, 0: all; default: the run's --num_eval_prompts, the same ones"
    add("--prompts", dest="num_eval_prompts", type=int, help=prompts)
    rule = "in place of the run's rule"
    add("--reward_fn", type=os.path.expanduser, metavar="FILE:FUNCTION", help=rule)
    add("--response_length", type=int, help="most tokens; default: the run's")
    model = "folder of a model with the run's tokens; default: RUN/model"
    add("--model", type=lambda path: Path(path).expanduser(), help=model)
    add("--seed", type=int, help="seed of the sampling; default: the run's")
    options = parser.parse_args()

    files = {options.run: "args.json", options.model or options.run / "model": "config.json"}
    for folder, name in files.items():
        if not (folder / name).is_file():
            parser.error(f"{folder} holds no {name}: it is not the folder of a run or a model")
    if options.samples > 1 and options.eval_temperature == 0:
        parser.error("--temperature 0 is greedy: all --samples would be one")
    evaluate(options, parser.error)


if __name__ == "__main__":
    main()
