"""Evaluates a run's saved model on held-out prompts: several samples a prompt,
with intervals, and compares models.

    # as the run evaluates itself: one greedy answer to each of its held-out prompts
    python scripts/evaluate.py output/RUN
    # eight answers to each prompt, at the temperature of training: mean and pass@k
    python scripts/evaluate.py output/RUN --samples 8
    # the same of the model before training as well, and the two compared
    python scripts/evaluate.py output/RUN --samples 8 --before
    # the same of any model with the run's tokens, compared with the run's
    python scripts/evaluate.py output/RUN --samples 8 --model MODEL
    # the same of another run, compared with the first one
    python scripts/evaluate.py output/OTHER --samples 8 --compare output/RUN

Prompts, lengths, stop tokens and rewards are those of the run, by its args.json
and the script that made it. Start it where the run was started. The script and
the file of the reward, as args.json names them, are run as they are: look at
both before you evaluate a run that is not yours.

pass@k is the share of prompts of which one of k answers is right, by the
unbiased estimator of arXiv 2107.03374. "Right" is as in the run's metrics: a
verifiable score of 1 or more, or what the reward returned as `right`. A
response whose reward failed has no score: each figure says of how many prompts
it is.

An interval, from low to high, is of 95%: how far other prompts of the same kind
might have moved the figure; another seed of training is not in it. Rows with
the same tokens and the same truth are one prompt. Fewer than 30 are too few.
Two models are compared prompt by prompt: a run's trained model less any other
that was asked the same, in RUN/evaluations or where --compare says.

It writes responses.jsonl and evaluation.json, of each data source too, in
RUN/evaluations/NAME.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import signal
import statistics
import sys
from collections import defaultdict
from dataclasses import fields, replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path

import pandas
import paths
from fork import import_fork
from run_files import is_right, read_args, read_lines

ROOT = Path(__file__).resolve().parent.parent
# What of a run's arguments decides which responses are sampled, and what they score; without dtype
# and seed, in which two models that are compared may differ
SETTINGS = ("eval_temperature", "response_length", "verification_reward", "reward_timeout")
SETTINGS += ("add_r1_style_format_reward", "r1_style_format_reward", "min_response_length")
SETTINGS += ("non_stop_penalty", "penalty_reward_value")
SETTINGS += ("reward_model_path", "reward_model_revision", "reward_model_multiplier")
Z = 1.96  # 95% of a normal distribution are so many standard deviations about its mean


# ---------------------------------------------------------------------------------------- figures


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The probability that k of a prompt's samples, drawn at random, have a right one.

    >>> from itertools import combinations
    >>> draws = list(combinations([True, True, False, False, False], 3))
    >>> pass_at_k(5, 2, 3) == sum(map(any, draws)) / len(draws) == 0.9
    True
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate(values: list[float], low: float = 0.0, high: float = 1.0) -> dict:
    """The mean of the prompts' values, which lie from `low` to `high`, with Wilson's interval.

    It stays between low and high, and is no point where every answer was right. Where all values
    are low or high, as scores of 0 and 1, its ends are the p with |mean - p| = 1.96 sqrt(p (1 - p)
    / n). Other values spread less: their n is as many of low or high as would give the mean this
    variance. Of values without limits, low and high are the least and the greatest that were seen;
    of 30 prompts and more the interval is then near the mean plus and minus 1.96 standard errors.

    >>> estimate([1.0] * 15 + [0.0] * 5)
    {'mean': 0.75, 'low': 0.5313, 'high': 0.8881, 'prompts': 20}
    >>> [round(abs(0.75 - p) / math.sqrt(p * (1 - p) / 20), 2) for p in (0.5313, 0.8881)]
    [1.96, 1.96]
    >>> estimate([-1.0] * 5 + [3.0] * 15, low=-1.0, high=3.0)  # the first, times 4, less 1
    {'mean': 2.0, 'low': 1.1252, 'high': 2.5526, 'prompts': 20}
    """
    mean, span = statistics.fmean(values), high - low
    if not span:
        return {"mean": round(mean, 4), "prompts": len(values)}
    share = min(1.0, max(0.0, (mean - low) / span))
    variance, most = statistics.pvariance(values) / span**2, share * (1 - share)
    # Of prompts that are all alike nothing is known about the spread
    count = len(values) * (most / variance if variance > 0 else 1)
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    width = Z * math.sqrt(most / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    ends = low + span * (center - width), low + span * (center + width)
    return rounded(mean, *ends) | {"prompts": len(values)}


def estimate_difference(differences: list[float], span: float) -> dict:
    """The mean of the prompts' differences between two models, with an interval; counts of signs.

    span: the largest difference that there can be. The interval is that of Bonett and Price (2012),
    the normal one of the differences and two more: one prompt was better and one worse, by the
    largest difference that was seen. So it is no point where no prompt was worse, or all are equal.

    >>> estimate_difference([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0], span=1.0)
    {'mean': 0.25, 'low': -0.2638, 'high': 0.6638, 'better': 3, 'worse': 1, 'equal': 4}
    >>> better, worse = (3 + 1) / (8 + 2), (1 + 1) / (8 + 2)
    >>> error = 1.96 * math.sqrt((better + worse - (better - worse) ** 2) / (8 + 2))
    >>> round(better - worse - error, 4), round(better - worse + error, 4)
    (-0.2638, 0.6638)
    """
    largest = max(map(abs, differences)) or span
    more = [*differences, largest, -largest]
    middle, error = statistics.fmean(more), Z * statistics.pstdev(more) / math.sqrt(len(more))
    low, high = max(-span, middle - error), min(span, middle + error)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    counts = {"better": better, "worse": worse, "equal": len(differences) - better - worse}
    return rounded(statistics.fmean(differences), low, high) | counts


def rounded(mean, low, high):
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}


def figures_of(rows: list[dict], worth: float = 1.0) -> dict[str, tuple]:
    """{name: (values, low, high)} of lines of responses.jsonl, without what no response has.

    values: of each prompt that has the figure its mean over the prompt's answers; a Series. low,
    high: what an answer's number is at least and at most; seen, or known to be possible. worth:
    what a right answer scores, --verification_reward.
    """
    names = ("score", "verifiable_score", "reward_model_score", "length")
    numbers = [
        {name: row.get(name) for name in names}
        | {f"reward/{name}": number for name, number in row["reward_metrics"].items()}
        | {"stop_rate": row["stopped"], "right": is_right(row)}
        for row in rows
    ]
    # What is None or not finite is no number: it counts nowhere
    frame = pandas.DataFrame(numbers).astype(float).replace([math.inf, -math.inf], math.nan)
    prompts = frame.groupby([row["problem"] for row in rows])
    right = prompts["right"].agg(["count", "sum"]).astype(int)
    figures = {}
    # As many answers as most prompts have: a few prompts may be there twice
    most = statistics.median_low(prompts.size())
    for k in (2**i for i in range(most.bit_length())):
        of_k = right[right["count"] >= k]
        passed = [pass_at_k(*counts, k) for counts in of_k.itertuples(index=False)]
        figures[f"pass@{k}"] = (pandas.Series(passed, of_k.index, float), 0.0, 1.0)

    unlimited = {"reward_model_score", "length"}
    unlimited |= set() if right["count"].any() else {"score"}
    for name in frame.columns.drop("right"):
        possible = [] if name in unlimited else [0.0, worth if name == "score" else 1.0]
        seen = [frame[name].min(), frame[name].max(), *possible]
        figures[name] = (prompts[name].mean().dropna(), min(seen), max(seen))
    return {name: figure for name, figure in figures.items() if len(figure[0])}


def summarize(rows: list[dict], worth: float = 1.0) -> dict:
    """Counts, and of each figure its mean, interval, and how many prompts have it."""
    counts = {
        "prompts": len({row["problem"] for row in rows}),
        "responses": len(rows),
        "reward_failures": sum(row["failure"] is not None for row in rows),
    }
    return counts | {
        name: estimate(values.tolist(), low, high)
        for name, (values, low, high) in figures_of(rows, worth).items()
    }


def compare(rows: list[dict], other_rows: list[dict], worth: float = 1.0) -> dict:
    """The differences of two models' scores and pass@1, on the prompts that both have them of."""
    ones, others = figures_of(rows, worth), figures_of(other_rows, worth)
    differences = {}
    for name in [name for name in ("score", "pass@1") if name in ones.keys() & others.keys()]:
        (one, *limits), (other, *other_limits) = ones[name], others[name]
        both = (one - other).dropna().tolist()
        if both:
            limits += other_limits
            differences[name] = estimate_difference(both, max(limits) - min(limits))
    return differences


def as_table(figures: dict[str, dict]) -> str:
    frame = pandas.DataFrame.from_dict(figures, orient="index")
    return frame.to_string(float_format="{:.4g}".format, na_rep="")


def show(evaluation: dict):
    """Prints an evaluation.json."""
    asked, results = evaluation["asked"], dict(evaluation["results"])
    print(f"\n{evaluation['model']} on {evaluation['dataset']}")
    print(f"answers to each row: {asked['samples']}, temperature {asked['eval_temperature']:g}")
    counts = (results.pop(name) for name in ("prompts", "responses", "reward_failures"))
    print("{:,} prompts, {:,} responses, the reward failed on {:,}".format(*counts))
    name = "pass@1" if "pass@1" in results else "score"
    sources = evaluation["by_source"]
    for source, figures in sources.items() if len(sources) > 1 else []:
        results |= {f"{name} {source}": figures[name]} if name in figures else {}
    print(as_table(results))
    if results.get("pass@1", {}).get("mean") == 0 < results["score"]["mean"]:
        print("\nNo answer counts as right: that takes a score of 1, or a reward's `right`")


# ---------------------------------------------------------------------------- the run, its script


def load_script(run_dir):
    """The script that made a run, as a module.

    Where it has changed since, that one; where it is gone, or asks vLLM otherwise than we do here,
    one of ours, for a run with adapters the fork lora. Either is said.
    """
    saved = read_args(run_dir)
    made = saved.get("provenance", {})
    named = [Path(word) for word in made.get("command", []) if word.endswith(".py")][:1]
    places = [*named, *(ROOT / path.name for path in named), ROOT / "grpo_vllm_async.py"]

    def is_it(path):
        return hashlib.sha256(path.read_bytes()).hexdigest() == made.get("script_sha256")

    path = max(filter(Path.is_file, places), key=is_it).resolve()  # the first, if none is
    sys.path[:0] = [str(path.parent), str(ROOT)]
    script, ours = map(importlib.import_module, (path.stem, "grpo_vllm_async"))
    trouble = "" if is_it(path) else "is not here as it was"

    def signatures(module):
        names = ("VLLM.sample", "grade_responses", "score_responses", "describe")
        return [inspect.signature(attrgetter(name)(module)) for name in names]

    if signatures(script) != signatures(ours):
        script, trouble = ours, "asks vLLM otherwise"
    if saved.get("lora_rank") and "lora_rank" not in script.Args.__dataclass_fields__:
        script, trouble = import_fork("lora"), "is not here as it was"
    if trouble:
        place = f"{script.__file__} takes its place"
        print(f"Warning: the script that made {run_dir} {trouble}; {place}")
    return script


def read_arguments(script, options):
    """The run's Args with what the options replace.

    Flags that only another of the scripts has are left out. All else on one process and one GPU.
    """
    saved, names = read_args(options.run), {field.name for field in fields(script.Args)}
    args = script.Args(**{name: value for name, value in saved.items() if name in names})
    args = replace(
        args,
        world_size=1,
        local_world_size=1,
        vllm_gpus=(),
        vllm_tensor_parallel_size=1,
        vllm_gpu_memory_utilization=0.9,
        reward_workers=min(8, len(os.sched_getaffinity(0))),  # cores that it may use
    )
    if (options.run / "model").is_dir():
        args = replace(args, tokenizer_name_or_path=str(options.run / "model"), chat_template=None)
    if options.eval_dataset and options.eval_dataset_split is None:  # the run's is of its own data
        args = replace(args, eval_dataset_split=script.Args.eval_dataset_split)
    given = {name: value for name, value in vars(options).items() if value is not None}
    args = replace(args, **{name: given[name] for name in names & given.keys()})
    # Several greedy answers would be one
    if options.samples > 1 and args.eval_temperature == 0:
        args = replace(args, eval_temperature=args.temperature)
    return args


def saved_at(folder):
    """When a model in a folder was saved; None: it is the hub's."""
    config = Path(folder) / "config.json"
    return round(config.stat().st_mtime, 3) if config.exists() else None


def files_of_reward(path: Path) -> list[Path]:
    """The file of a reward, and what it imports from its folder, packages as a whole."""
    files, ahead = [], [path]
    while ahead:
        path = ahead.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        imports = re.findall(r"^\s*(?:from|import)\s(.*)", path.read_text("utf-8"), re.MULTILINE)
        for name in re.findall(r"\w+", " ".join(imports)):
            beside = files[0].parent / name
            ahead += [beside.with_suffix(".py"), *sorted(beside.rglob("*.py"))]
    return files


def what_is_asked(script, args, options, prompts):
    """What decides which responses are sampled, and what they score: two models can be compared
    where all of it is alike.

    Without a reward of the run's own the rule is the script's.
    """
    path, _, function = (args.reward_fn or f"{script.__file__}:").rpartition(":")
    files = files_of_reward(Path(path)) if function else [Path(path)]
    for module in re.findall(r"([\w.]+)\.\w", function):  # which trl_rewards.py imports
        files += files_of_reward(Path(module.replace(".", "/")).with_suffix(".py"))
    code = b"".join(file.read_bytes() for file in files)
    return {name: getattr(args, name) for name in SETTINGS} | {
        "samples": options.samples,
        "prompts": script.stable_hash([vars(prompt) | {"origin": None} for prompt in prompts]),
        "reward": f"{function} {hashlib.sha256(code).hexdigest()[:16]}",
        "reward_model_saved": saved_at(args.reward_model_path) if args.reward_model_path else None,
    }


def find_others(evaluation, run_dir, compared, fail):
    """The folders of other models' evaluations with the same questions, the newest of each; and
    lines that say why other models are not among them.

    compared: --compare, a run's folder or an evaluation's, which must have one; None: those of this
    run, if there are any. fail: as in evaluate.
    """
    found, reasons = {}, {}
    for path in sorted((compared or run_dir).glob("**/evaluation.json")):
        other = json.loads(path.read_bytes())
        asked, was_asked = evaluation["asked"], other.get("asked", {})
        differing = [
            f"{name} ({was_asked.get(name)} there, {asked[name]} here)"
            for name in asked
            if was_asked.get(name, ...) != asked[name]
        ]
        if other["of"] != evaluation["of"]:
            place = reasons if differing else found
            place[tuple(other["of"])] = (path.parent, ", ".join(differing))
    reasons = [
        f"Not compared with {folder}, which differs in {differing}"
        for model, (folder, differing) in reasons.items()
        if model not in found
    ]
    if not found and not reasons:
        reasons = [f"Nothing is compared: no other model was evaluated in {compared or run_dir}"]
    if compared and not found:
        fail(f"--compare: {'; '.join(reasons)}")
    return [folder for folder, _ in found.values()], reasons


def show_comparison(folder: Path, other: Path, worth: float):
    """Prints how the responses in two evaluations' folders compare: the trained model's first."""
    one, two = (
        json.loads((each / "evaluation.json").read_bytes())
        | {"rows": read_lines(each / "responses.jsonl")}
        for each in (folder, other)
    )
    if two["of"][0] == "trained" != one["of"][0]:
        one, two = two, one
    print(f"\n{one['model']} less {two['model']}, prompt by prompt ({other.name})")
    differences = compare(one["rows"], two["rows"], worth)
    print(as_table(differences) if differences else "No prompt has a score of both")


# ---------------------------------------------------------------------------------------- answers


def load_held_out(script, args, options):
    """The tokenizer and the held-out Prompts, drawn as the run draws them."""
    tokenizer = script.load_tokenizer(args)
    if options.model:
        own = script.AutoTokenizer.from_pretrained(options.model)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{options.model} has other tokens than the run's model")
    source = (args.eval_dataset, args.eval_dataset_config, args.eval_dataset_split)
    prompts = script.load_prompts(*source, tokenizer, args, is_eval=True)
    if 0 < args.num_eval_prompts < len(prompts):
        drawn = script.draw_prompts(len(prompts), 0, args.num_eval_prompts, seed=0)
        prompts = [prompts[i] for i in drawn]
    return tokenizer, prompts


def sample(script, prompts, args, options):
    """The Responses of a model to some Prompts, the samples of a prompt side by side."""
    from safetensors.torch import load_file

    model_path = str(options.model or options.run / "model")
    gpus = (0,) if script.torch.cuda.device_count() else ()
    has_adapter = bool(getattr(args, "lora_rank", 0))
    if has_adapter:
        # Rounded to bfloat16 the merged model would lose a part of what it learnt
        model_path = str(options.model or args.model_name_or_path)
        args = replace(args, model_name_or_path=model_path)  # vLLM loads it from there
    # Only its weights are needed, which vLLM gets one by one: on a GPU there is never a second copy
    weights_alone = replace(args, model_name_or_path=model_path, attn_implementation="eager")
    policy_class = script.AutoModelForCausalLM
    model = script.load_model(policy_class, model_path, weights_alone, trained=has_adapter)
    repeated = [prompt for prompt in prompts for _ in range(options.samples)]
    places = (divmod(number, options.samples) for number in range(len(repeated)))
    seeds = [script.stable_hash(args.seed, "evaluation", *place) for place in places]
    print("Starting vLLM ...", flush=True)
    max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    vllm = script.VLLM((0, 1, gpus), model.config, max_length, args)
    device = "cuda" if gpus else "cpu"
    # As the scripts send them: a tied head as well on a CPU, once on a GPU
    parameters = model.named_parameters(remove_duplicate=bool(gpus))
    weights = ((name, weight.data.to(device)) for name, weight in parameters)
    if has_adapter and options.model:  # another model gets an adapter of zeros
        weights = script.gather_weights(model, args)
    elif has_adapter:
        items = load_file(options.run / "adapter/adapter_model.safetensors").items()
        weights = ((name.removeprefix("base_model.model."), weight) for name, weight in items)
    vllm.sync_weights(weights, 0)
    print(f"Sampling {len(repeated):,} responses ...", flush=True)
    return vllm.sample(repeated, seeds, args.eval_temperature)


def answer_prompts(script, tokenizer, prompts, args, options):
    """The Responses to some Prompts with their scores."""
    workers = None
    try:
        if args.reward_fn:  # first, for it may not load
            workers = script.start_reward_workers(args)
        responses = sample(script, prompts, args, options)
        responses = script.grade_responses(responses, tokenizer, workers, args)
    finally:
        script.end_children()
    accelerator = script.Accelerator(mixed_precision="no")
    reward_model, path = None, args.reward_model_path
    if script.uses_reward_model(args):
        reward_model = script.load_classifier(
            accelerator, script.RewardModel, path, args, trained=False
        )
    return script.score_responses(accelerator, reward_model, responses, args, is_eval=True)


def rows_of(script, responses, num_samples):
    """Lines of responses.jsonl: what samples.jsonl has of a response, and which one it is."""
    rows = []
    for number, response in enumerate(responses):
        index, sample = divmod(number, num_samples)
        prompt = response.prompt
        # The same in every evaluation of this prompt, and in rows that repeat it
        problem = f"{script.stable_hash(list(prompt.token_ids), prompt.ground_truth):016x}"
        place = {"prompt_index": index, "sample": sample, "problem": problem}
        place["origin"] = prompt.origin  # its dataset and row
        rows.append(place | script.describe(response, None))
    return rows


def evaluate(options, fail):
    """Makes the evaluation, shows it, and compares it with others.

    fail: parser.error, which ends this program with a line.
    """
    # Not before the command line is known to be right, for it takes seconds
    script = load_script(options.run)
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
    model = str(options.model or options.run / "model")
    evaluation = {
        "model": model,
        "dataset": args.eval_dataset,
        # A run's own not by its place, which may move
        "of": [str(options.model or "trained"), saved_at(model)],
        "asked": what_is_asked(script, args, options, prompts),
        "seed": args.seed,
    }
    others, reasons = find_others(evaluation, options.run, options.compare, fail)
    responses = answer_prompts(script, tokenizer, prompts, args, options)
    rows = rows_of(script, responses, options.samples)
    worth, by_source = args.verification_reward, defaultdict(list)
    for row in rows:
        by_source[str(row["data_source"])].append(row)
    evaluation |= {
        "results": summarize(rows, worth),
        "by_source": {source: summarize(some, worth) for source, some in by_source.items()},
    }
    size = f"{len(prompts)}x{options.samples}"
    name = f"{Path(evaluation['of'][0]).name}_{size}_{datetime.now():%Y%m%d_%H%M%S_%f}"
    folder = options.run / "evaluations" / name
    folder.mkdir(parents=True)
    lines = [json.dumps(row, default=str) + "\n" for row in rows]  # as the scripts write them
    (folder / "responses.jsonl").write_text("".join(lines), "utf-8")
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2), "utf-8")
    show(evaluation)
    for other in others:
        show_comparison(folder, other, worth)
    print("", *reasons, sep="\n")
    print(f"\nAll responses and figures: {folder}")


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends this, whatever it waits for
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", type=lambda path: Path(path).expanduser(), help="folder of the run")
    add("--samples", type=int, default=1, help="answers to each row (default 1)")
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
    model = "folder of a model with the run's tokens, or its name on the hub; default: RUN/model"
    add("--model", type=os.path.expanduser, help=model)
    before = "evaluate the model before training as well, first, and compare the two"
    add("--before", action="store_true", help=before)
    add("--seed", type=int, help="seed of the sampling; default: the run's")
    others = "folder of another run or evaluation, to compare with; default: this run's others"
    add("--compare", type=lambda path: Path(path).expanduser(), metavar="FOLDER", help=others)
    options = parser.parse_args()

    if not (options.run / "args.json").is_file():
        parser.error(f"{options.run} holds no args.json: it is not the folder of a run")
    if options.before and options.model:
        parser.error("--before names the model that the run began with; leave --model out")
    models = [options.model]
    if options.before:
        models = [read_args(options.run)["model_name_or_path"], None]
    for model in models:
        # A run's own folder is no name of the hub
        path = model or (options.run / "model").absolute()
        if trouble := paths.trouble_with_model(path):
            parser.error(f"{path}: {trouble}")
    if options.samples > 1 and options.eval_temperature == 0:
        parser.error("--temperature 0 is greedy: all --samples would be one")
    for options.model in models:
        evaluate(options, parser.error)


if __name__ == "__main__":
    main()
