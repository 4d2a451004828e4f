"""Evaluate a run's saved model on held-out prompts, with intervals, and compare models.

    # as the run evaluates itself: one greedy answer to each held-out prompt
    python scripts/evaluate.py output/RUN
    # eight answers to each prompt, at the temperature of training: mean and pass@k
    python scripts/evaluate.py output/RUN --samples 8
    # also the model before training, compared with the trained one
    python scripts/evaluate.py output/RUN --samples 8 --before
    # any model with the run's tokens, compared with the run's
    python scripts/evaluate.py output/RUN --samples 8 --model MODEL
    # another run, compared with the first one
    python scripts/evaluate.py output/OTHER --samples 8 --compare output/RUN

Prompts, lengths, stop tokens and rewards are those of the run, read from its
args.json and the script that made it. Start this program where the run was
started. It executes the script and the file of the reward that args.json names,
so read both before you evaluate a run that is not yours.

pass@k is the fraction of prompts for which at least one of k answers is
correct, by the unbiased estimator of arXiv 2107.03374. As in the run's metrics,
an answer is correct if its verifiable score is 1 or more, or if the reward
returned `right`. A response has no score if its reward failed. The column
`prompts` says how many prompts a figure is over.

`low` and `high` are a 95% interval: how far other prompts of the same kind
could have moved the figure. It does not include the variation between training
seeds. Examples with the same tokens and ground truth count as one prompt. Fewer
than 30 prompts are too few. Two models are compared prompt by prompt. The
difference is the run's trained model minus another model that had the same
prompts and settings, in RUN/evaluations or in the folder of --compare.

It writes responses.jsonl and evaluation.json, which also has the figures of each
data source, in RUN/evaluations/NAME.
"""

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
from fork import import_fork
from internal import model_paths
from internal.run_files import NONE_RIGHT, is_right, make_parser, read_args, read_lines

ROOT = Path(__file__).resolve().parent.parent
# The arguments that decide which responses are generated, and what they score. Dtype and seed are
# not among them, so models that differ in these can be compared
SETTINGS = ("eval_temperature", "response_length", "verification_reward", "reward_timeout")
SETTINGS += ("add_r1_style_format_reward", "r1_style_format_reward", "min_response_length")
SETTINGS += ("non_stop_penalty", "penalty_reward_value")
SETTINGS += ("reward_model_path", "reward_model_revision", "reward_model_multiplier")
Z = 1.96  # 95% of a normal distribution lie within this many standard deviations of its mean


# ---------------------------------------------------------------------------------------- figures


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that k answers, drawn from a prompt's, include a correct one.

    >>> from itertools import combinations
    >>> draws = list(combinations([True, True, False, False, False], 3))
    >>> pass_at_k(5, 2, 3) == sum(map(any, draws)) / len(draws) == 0.9
    True
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def wilson(fraction: float, count: float) -> tuple[float, float]:
    """Return the ends of Wilson's 95% interval for a fraction of `count` prompts.

    They are the p with |fraction - p| = 1.96 sqrt(p (1 - p) / count). They lie within 0 and 1, and
    differ even if the fraction is 0 or 1.

    >>> [round(abs(0.75 - p) / math.sqrt(p * (1 - p) / 20), 2) for p in wilson(0.75, 20)]
    [1.96, 1.96]
    """
    center = fraction + Z**2 / (2 * count)
    width = Z * math.sqrt(fraction * (1 - fraction) / count + Z**2 / (4 * count**2))
    return (center - width) / (1 + Z**2 / count), (center + width) / (1 + Z**2 / count)


def estimate(values: list[float], low: float = 0.0, high: float = 1.0) -> dict:
    """Return the mean of the prompts' values, with Wilson's interval scaled to [low, high].

    low and high are the limits of a value, or if it has none, the extremes that were seen. If every
    value is low or high, such as 0 and 1, the interval's count is the number of prompts. Other
    values vary less. Their count is the higher number of prompts at which a mean of only low and
    high values would have the same variance. From 30 prompts on, the interval is close to the mean
    plus and minus 1.96 standard errors if values are not near a limit.

    >>> estimate([1.0] * 15 + [0.0] * 5)
    {'mean': 0.75, 'low': 0.5313, 'high': 0.8881, 'prompts': 20}
    >>> estimate([-1.0] * 5 + [3.0] * 15, low=-1.0, high=3.0)  # four times the above, minus 1
    {'mean': 2.0, 'low': 1.1252, 'high': 2.5526, 'prompts': 20}
    """
    mean, span = statistics.fmean(values), high - low
    if not span:
        return {"mean": round(mean, 4), "prompts": len(values)}
    fraction = min(1.0, max(0.0, (mean - low) / span))
    variance = statistics.pvariance(values) / span**2
    # If all values are equal, nothing is known about their variance
    count = len(values) * (fraction * (1 - fraction) / variance if variance > 0 else 1)
    ends = (low + span * end for end in wilson(fraction, count))
    return rounded(mean, *ends) | {"prompts": len(values)}


def estimate_difference(differences: list[float], span: float) -> dict:
    """Return the mean of the prompts' differences between two models, with an interval and counts.

    The interval is that of Bonett and Price (2012). It is the normal interval after two prompts
    were added, one better and one worse by the largest difference that was seen. It therefore has a
    width even if no prompt is worse, or if all are equal. span: the largest possible difference.

    >>> estimate_difference([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0], span=1.0)
    {'mean': 0.25, 'low': -0.2638, 'high': 0.6638, 'better': 3, 'worse': 1, 'equal': 4}
    >>> better, worse = (3 + 1) / (8 + 2), (1 + 1) / (8 + 2)
    >>> error = 1.96 * math.sqrt((better + worse - (better - worse) ** 2) / (8 + 2))
    >>> round(better - worse - error, 4), round(better - worse + error, 4)
    (-0.2638, 0.6638)
    """
    largest = max(map(abs, differences)) or span
    padded = [*differences, largest, -largest]
    middle = statistics.fmean(padded)
    error = Z * statistics.pstdev(padded) / math.sqrt(len(padded))
    low, high = max(-span, middle - error), min(span, middle + error)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    counts = {"better": better, "worse": worse, "equal": len(differences) - better - worse}
    return rounded(statistics.fmean(differences), low, high) | counts


def rounded(mean, low, high):
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}


def figures_of(rows: list[dict], worth: float = 1.0) -> dict[str, tuple]:
    """Return {name: (values, low, high)} of lines of responses.jsonl, for figures that exist.

    values is a Series with the mean over a prompt's answers. low and high are the least and the
    most that an answer can have, or had if no limit is known. worth: --verification_reward, which
    is the score of a correct answer.
    """
    names = ("score", "verifiable_score", "reward_model_score", "length")
    numbers = [
        {name: row.get(name) for name in names}
        | {f"reward/{name}": number for name, number in row["reward_metrics"].items()}
        | {"stop_rate": row["stopped"], "right": is_right(row)}
        for row in rows
    ]
    # Numbers that are None or not finite are ignored
    frame = pandas.DataFrame(numbers).astype(float).replace([math.inf, -math.inf], math.nan)
    prompts = frame.groupby([row["problem"] for row in rows])
    right = prompts["right"].agg(["count", "sum"]).astype(int)
    figures = {}
    # The number of answers that most prompts have, because a dataset can repeat a few prompts
    samples = statistics.median_low(prompts.size())
    for k in (2**i for i in range(samples.bit_length())):
        answered = right[right["count"] >= k]
        passed = [pass_at_k(*counts, k) for counts in answered.itertuples(index=False)]
        figures[f"pass@{k}"] = (pandas.Series(passed, answered.index, float), 0.0, 1.0)

    unlimited = {"reward_model_score", "length"}
    unlimited |= set() if right["count"].any() else {"score"}
    for name in frame.columns.drop("right"):
        possible = [] if name in unlimited else [0.0, worth if name == "score" else 1.0]
        seen = [frame[name].min(), frame[name].max(), *possible]
        figures[name] = (prompts[name].mean().dropna(), min(seen), max(seen))
    return {name: figure for name, figure in figures.items() if len(figure[0])}


def summarize(rows: list[dict], worth: float = 1.0) -> dict:
    """Return counts, and for each figure its mean, interval, and number of prompts."""
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
    """Return the differences in score and pass@1 on the prompts for which both models have them."""
    figures, other_figures = figures_of(rows, worth), figures_of(other_rows, worth)
    comparison = {}
    for name in [name for name in ("score", "pass@1") if name in figures and name in other_figures]:
        (values, *limits), (other_values, *other_limits) = figures[name], other_figures[name]
        differences = (values - other_values).dropna().tolist()
        span = max(limits + other_limits) - min(limits + other_limits)
        if differences:
            comparison[name] = estimate_difference(differences, span)
    return comparison


def as_table(figures: dict[str, dict]) -> str:
    frame = pandas.DataFrame.from_dict(figures, orient="index")
    return frame.to_string(float_format="{:.4g}".format, na_rep="")


def show(evaluation: dict):
    """Print an evaluation.json."""
    settings, results = evaluation["asked"], dict(evaluation["results"])
    print(f"\n{evaluation['model']} on {evaluation['dataset']}")
    counts = (results.pop(name) for name in ("prompts", "responses", "reward_failures"))
    print("{:,} prompts, {:,} responses; the reward failed for {:,}".format(*counts))
    print(f"{settings['samples']} per prompt, at temperature {settings['eval_temperature']:g}")
    name = "pass@1" if "pass@1" in results else "score"
    sources = evaluation["by_source"]
    for source, figures in sources.items() if len(sources) > 1 else []:
        results |= {f"{name} {source}": figures[name]} if name in figures else {}
    print(as_table(results))
    if results.get("pass@1", {}).get("mean") == 0 < results["score"]["mean"]:
        print(f"\n{NONE_RIGHT}")


# ---------------------------------------------------------------------------- the run, its script


def load_script(run_dir):
    """Import the script that made a run.

    If it has changed since, use it as it is now. If it is missing, or has another interface, use
    one of this repository's scripts, or the fork lora if the run has adapters. Print which.
    """
    saved = read_args(run_dir)
    provenance = saved.get("provenance", {})
    named = [Path(word) for word in provenance.get("command", []) if word.endswith(".py")][:1]
    paths = [*named, *(ROOT / path.name for path in named), ROOT / "grpo_vllm_async.py"]

    def is_unchanged(path):
        return hashlib.sha256(path.read_bytes()).hexdigest() == provenance.get("script_sha256")

    path = max(filter(Path.is_file, paths), key=is_unchanged).resolve()  # or else the first
    sys.path[:0] = [str(path.parent), str(ROOT)]
    script, ours = map(importlib.import_module, (path.stem, "grpo_vllm_async"))
    problem = "" if is_unchanged(path) else "is missing or has changed"
    if interface_of(script) != interface_of(ours):
        script, problem = ours, "has a different interface"
    if saved.get("lora_rank") and "lora_rank" not in script.Args.__dataclass_fields__:
        script, problem = import_fork("lora"), "is missing or has changed"
    if problem:
        print(f"Warning: the script that made {run_dir} {problem}; using {script.__file__} instead")
    return script


def interface_of(script):
    """Return the signatures of what this program calls in a script."""
    names = ("VLLM.sample", "grade_responses", "score_responses", "describe")
    return [inspect.signature(attrgetter(name)(script)) for name in names]


def read_arguments(script, options):
    """Return the run's Args with the changes of the options, for one process and one GPU.

    Flags that this script does not have are left out.
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
    if options.eval_dataset and options.eval_dataset_split is None:
        # The run's split is one of the run's dataset
        args = replace(args, eval_dataset_split=script.Args.eval_dataset_split)
    given = {name: value for name, value in vars(options).items() if value is not None}
    args = replace(args, **{name: given[name] for name in names & given.keys()})
    # Several greedy answers would be equal
    if options.samples > 1 and args.eval_temperature == 0:
        args = replace(args, eval_temperature=args.temperature)
    return args


def saved_at(folder):
    """Return when a model in a folder was saved, or None for one of the Hub."""
    config = Path(folder) / "config.json"
    return round(config.stat().st_mtime, 3) if config.exists() else None


def files_of_reward(path: Path) -> list[Path]:
    """Return the file of a reward, and the modules or packages that it imports beside it."""
    files, unread = [], [path]
    while unread:
        path = unread.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        imports = re.findall(r"^\s*(?:from|import)\s(.*)", path.read_text("utf-8"), re.MULTILINE)
        for name in re.findall(r"\w+", " ".join(imports)):
            neighbour = files[0].parent / name
            unread += [neighbour.with_suffix(".py"), *sorted(neighbour.rglob("*.py"))]
    return files


def settings_of(script, args, options, prompts):
    """Return what decides which responses are generated and what they score.

    Two models can be compared only if all of it is equal.
    """
    # Without --reward_fn the script grades the answers
    path, _, function = (args.reward_fn or f"{script.__file__}:").rpartition(":")
    files = files_of_reward(Path(path)) if function else [Path(path)]
    for module in re.findall(r"([\w.]+)\.\w", function):  # modules that trl_rewards.py imports
        files += files_of_reward(Path(module.replace(".", "/")).with_suffix(".py"))
    code = b"".join(file.read_bytes() for file in files)
    return {name: getattr(args, name) for name in SETTINGS} | {
        "samples": options.samples,
        "prompts": script.stable_hash([vars(prompt) | {"origin": None} for prompt in prompts]),
        "reward": f"{function} {hashlib.sha256(code).hexdigest()[:16]}",
        "reward_model_saved": saved_at(args.reward_model_path) if args.reward_model_path else None,
    }


def find_others(evaluation, run_dir, compared, fail):
    """Return folders to compare with, the newest of each other model, and reasons against others.

    compared: the folder of --compare, which must have an evaluation, or None for those of this run,
    if there are any. fail: as in evaluate.
    """
    found, differing = {}, {}
    for path in sorted((compared or run_dir).glob("**/evaluation.json")):
        other = json.loads(path.read_bytes())
        settings, other_settings = evaluation["asked"], other.get("asked", {})
        differences = [
            f"{name} ({other_settings.get(name)} there, {value} here)"
            for name, value in settings.items()
            if other_settings.get(name, ...) != value
        ]
        if other["of"] != evaluation["of"]:
            models = differing if differences else found
            models[tuple(other["of"])] = (path.parent, ", ".join(differences))
    reasons = [
        f"Not compared with {folder}, because it differs in {differences}"
        for model, (folder, differences) in differing.items()
        if model not in found
    ]
    if not found and not reasons:
        reasons = [f"No comparison: {compared or run_dir} has no evaluation of another model"]
    if compared and not found:
        fail(f"--compare: {'; '.join(reasons)}")
    return [folder for folder, _ in found.values()], reasons


def read_evaluation(folder: Path) -> dict:
    rows = read_lines(folder / "responses.jsonl")
    return json.loads((folder / "evaluation.json").read_bytes()) | {"rows": rows}


def show_comparison(folder: Path, other_folder: Path, worth: float):
    """Print the differences between two evaluations. The trained model comes first."""
    first, second = read_evaluation(folder), read_evaluation(other_folder)
    if second["of"][0] == "trained" != first["of"][0]:
        first, second = second, first
    print(f"\n{first['model']} minus {second['model']}, per prompt ({other_folder.name})")
    differences = compare(first["rows"], second["rows"], worth)
    print(as_table(differences) if differences else "No prompt has a score from both models")


# ---------------------------------------------------------------------------------------- answers


def load_held_out(script, args, options):
    """Return the tokenizer and the held-out Prompts, drawn as the run draws them."""
    tokenizer = script.load_tokenizer(args)
    if options.model:
        its_tokenizer = script.AutoTokenizer.from_pretrained(options.model)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{options.model} must have the same tokens as the run's model")
    source = (args.eval_dataset, args.eval_dataset_config, args.eval_dataset_split)
    prompts = script.load_prompts(*source, tokenizer, args, is_eval=True)
    if 0 < args.num_eval_prompts < len(prompts):
        drawn = script.draw_prompts(len(prompts), 0, args.num_eval_prompts, seed=0)
        prompts = [prompts[i] for i in drawn]
    return tokenizer, prompts


def sample(script, prompts, args, options):
    """Return a model's Responses to some Prompts. Those to one prompt are next to each other."""
    from safetensors.torch import load_file

    model_path = str(options.model or options.run / "model")
    gpus = (0,) if script.torch.cuda.device_count() else ()
    has_adapter = bool(getattr(args, "lora_rank", 0))
    if has_adapter:
        # Rounding the merged model to bfloat16 would lose a part of what it learned
        model_path = str(options.model or args.model_name_or_path)
        args = replace(args, model_name_or_path=model_path)  # vLLM loads it from there
    # vLLM gets the weights from the CPU one by one, so that a GPU never holds a second copy
    on_cpu = replace(args, model_name_or_path=model_path, attn_implementation="eager")
    policy_class = script.AutoModelForCausalLM
    model = script.load_model(policy_class, model_path, on_cpu, trained=has_adapter)
    repeated = [prompt for prompt in prompts for _ in range(options.samples)]
    numbers = (divmod(number, options.samples) for number in range(len(repeated)))
    seeds = [script.stable_hash(args.seed, "evaluation", *pair) for pair in numbers]
    print("Starting vLLM ...", flush=True)
    max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    vllm = script.VLLM((0, 1, gpus), model.config, max_length, args)
    device = "cuda" if gpus else "cpu"
    # Send weights as the scripts do: a tied head is sent separately on a CPU, but not on a GPU
    parameters = model.named_parameters(remove_duplicate=bool(gpus))
    weights = ((name, weight.data.to(device)) for name, weight in parameters)
    if has_adapter and options.model:  # another model gets an adapter of zeros
        weights = script.gather_weights(model, args)
    elif has_adapter:
        items = load_file(options.run / "adapter/adapter_model.safetensors").items()
        weights = ((name.removeprefix("base_model.model."), weight) for name, weight in items)
    vllm.sync_weights(weights, 0)
    print(f"Generating {len(repeated):,} responses ...", flush=True)
    return vllm.sample(repeated, seeds, args.eval_temperature)


def answer_prompts(script, tokenizer, prompts, args, options):
    """Return Responses to some Prompts, with scores."""
    workers = None
    try:
        if args.reward_fn:  # workers start first, because a reward that does not load ends this
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
    """Return lines of responses.jsonl, which are those of samples.jsonl with an identity."""
    rows = []
    for number, response in enumerate(responses):
        index, sample = divmod(number, num_samples)
        prompt = response.prompt
        # This is equal in every evaluation of the prompt, and in examples that repeat it
        problem = f"{script.stable_hash(list(prompt.token_ids), prompt.ground_truth):016x}"
        identity = {"prompt_index": index, "sample": sample, "problem": problem}
        identity["origin"] = prompt.origin  # the dataset and the example's number
        rows.append(identity | script.describe(response, None))
    return rows


def evaluate(options, fail):
    """Evaluate a model, print the result, and compare it with others.

    fail: parser.error, which prints a line and ends this program.
    """
    # Load the script after the command line was checked, because it takes seconds
    script = load_script(options.run)
    script.transformers.utils.logging.set_verbosity_error()
    script.transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for vLLM's process
    args = read_arguments(script, options)
    if args.eval_dataset is None:
        fail("the run has no --eval_dataset; pass --dataset")
    if args.reward_fn and not os.path.isfile(args.reward_fn.rpartition(":")[0]):
        fail(f"--reward_fn {args.reward_fn}: the file does not exist; pass FILE.py:FUNCTION")
    try:
        tokenizer, prompts = load_held_out(script, args, options)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        fail(" ".join([str(error), *getattr(error, "__notes__", [])]))
    model = str(options.model or options.run / "model")
    evaluation = {
        "model": model,
        "dataset": args.eval_dataset,
        # The run's own model is not identified by its path, because a run's folder can be moved
        "of": [str(options.model or "trained"), saved_at(model)],
        "asked": settings_of(script, args, options, prompts),
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
        "by_source": {source: summarize(part, worth) for source, part in by_source.items()},
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
    print(f"\nResponses and figures: {folder}")


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this at once
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run", type=lambda path: Path(path).expanduser(), help="Folder of the run.")
    add("--samples", type=int, default=1, help="Answers per prompt (default 1).")
    temperature = "Temperature of sampling. Defaults to the run's --eval_temperature, or to its "
    temperature += "--temperature if that is 0 and there are several samples."
    add("--temperature", dest="eval_temperature", type=float, help=temperature)
    dataset = "Held-out prompts. Default: the run's."
    add("--dataset", dest="eval_dataset", type=os.path.expanduser, help=dataset)
    split = "Split of the held-out prompts on the Hub. Default: the run's."
    add("--dataset_split", dest="eval_dataset_split", help=split)
    config = "Configuration of the held-out prompts on the Hub. Default: the run's."
    add("--dataset_config", dest="eval_dataset_config", help=config)
    prompts = "Number of held-out prompts. 0 means all. Defaults to the run's --num_eval_prompts, "
    prompts += "which are the same prompts."
    add("--prompts", dest="num_eval_prompts", type=int, help=prompts)
    reward = "Reward function to use instead of the run's."
    add("--reward_fn", type=os.path.expanduser, metavar="FILE:FUNCTION", help=reward)
    length = "Maximum number of tokens in a response. Default: the run's."
    add("--response_length", type=int, help=length)
    model = "Model with the run's tokens, as a folder or a name on the Hub. Default: RUN/model."
    add("--model", type=os.path.expanduser, help=model)
    before = "Evaluate the model before training as well, and compare the two."
    add("--before", action="store_true", help=before)
    add("--seed", type=int, help="Seed of sampling. Default: the run's.")
    others = "Folder of a run or an evaluation to compare with. Default: this run's evaluations."
    add("--compare", type=lambda path: Path(path).expanduser(), metavar="FOLDER", help=others)
    options = parser.parse_args()

    if not (options.run / "args.json").is_file():
        parser.error(f"{options.run} is not the folder of a run, because it has no args.json")
    if options.before and options.model:
        parser.error("--before evaluates the model that the run began with; remove --model")
    models = [options.model]
    if options.before:
        models = [read_args(options.run)["model_name_or_path"], None]
    for model in models:
        # A relative path of the run's folder could be a name on the Hub
        path = model or (options.run / "model").absolute()
        if problem := model_paths.trouble_with_model(path):
            parser.error(f"{path}: {problem}")
    if options.samples > 1 and options.eval_temperature == 0:
        parser.error("--temperature 0 is greedy, so all --samples would be equal")
    for options.model in models:
        evaluate(options, parser.error)


if __name__ == "__main__":
    main()
