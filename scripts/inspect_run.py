"""Show a run in the terminal, while it trains or afterwards.

It prints how far the run is, its last metrics, what limited its speed, and
training responses of the last step.

    python scripts/inspect_run.py output/RUN
    # every 10 seconds
    watch -n 10 python scripts/inspect_run.py output/RUN
    # what the scripts print at the end of a run: answers before and after
    # training, what limited its speed, and next commands; also draws the curves
    python scripts/inspect_run.py output/RUN --summary

For curves, tokens with their numbers, and incorrect answers, use report.py.
"""

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from internal import run_summary as summary
from internal.run_curves import Run, draw_run, lines_of_table
from internal.run_files import make_parser, read_args, read_lines, read_metrics, read_rollouts
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

# What --summary lists if it exists, because an interrupted run has no model
FILES = {"model": "model", "metrics": "metrics.jsonl", "samples": "samples.jsonl"}
FILES |= {"curves": "curves.png", "prompts' lengths": "token_length.png"}
LETTERS = 500  # characters that are shown of a response


def end_of_prompt(row: dict) -> str:
    prompt = summary.in_one_line(row["prompt"])
    return prompt if len(prompt) <= 200 else f"... {prompt[-200:]}"


def text_of(row: dict) -> str:
    """Return a response. If it has several turns, observations are in brackets."""
    turns = row.get("turns") or [row["response"]]
    return " ".join(f"[{turn}]" if i % 2 else turn for i, turn in enumerate(turns))


def describe_samples(samples: list[dict], number: int = 3) -> list[str]:
    """Return answers to the first held-out prompts, by the first and by the last policy."""
    versions = sorted({sample["policy_version"] for sample in samples})
    if len(versions) < 2:
        return []
    answers = defaultdict(dict)  # {prompt: {policy version: line}}
    for row in samples:
        answers[row["prompt"], row.get("ground_truth")][row["policy_version"]] = row
    ends = {"before": versions[0], "after": versions[-1]}
    lines = []
    answered = [
        by_version for by_version in answers.values() if by_version.keys() >= {*ends.values()}
    ]
    for by_version in answered[:number]:
        lines += ["", end_of_prompt(by_version[versions[0]])]
        for when, version in ends.items():
            row = by_version[version]
            answer = summary.both_ends(summary.in_one_line(text_of(row)), 200)
            lines.append(f"  {when}, score {summary.show_score(row['score'])}: {answer}")
    return lines


def next_steps(run_dir: Path) -> list[str]:
    """Return the next commands, as they can be typed where this program was called."""
    python = Path(sys.prefix).with_name(".venv") / "bin/python"  # a link to this environment
    if not (python.exists() and python.parent.samefile(Path(sys.executable).parent)):
        python = sys.executable

    def command(program, *words):
        paths = [python, Path(__file__).with_name(program), run_dir, *words]
        return shlex.join(str(path).removeprefix(f"{Path.cwd()}/") for path in paths)

    lines = [
        f"Look at it:  {command('inspect_run.py')}",
        f"As a page:   {command('report.py')}",
        f"Compare it:  {command('plot_runs.py', 'OTHER_RUN')}",
    ]
    model = run_dir / "model"
    steps = [path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*")]
    steps = [int(step) for step in steps if step.isdecimal()]
    if model.is_dir():
        lines.append(f'Use it:      transformers.AutoModelForCausalLM.from_pretrained("{model}")')
        # vLLM would choose bfloat16, whose rounding removes part of what a merged adapter changed
        dtype = ', dtype="float32"' if (run_dir / "adapter").is_dir() else ""
        lines.append(f'             vllm.LLM("{model}"{dtype})')
    elif steps:
        newest = run_dir / f"checkpoints/step_{max(steps)}"
        lines.append(f"Resume it:   repeat its command with --resume_from_checkpoint {newest}")
    return lines


def print_summary(run_dir: Path, metrics: list[dict]):
    draw_run(run_dir)
    sentences = [*summary.describe_evaluations(metrics), *summary.describe_troubles(metrics)]
    sentences.append(summary.describe_speed(metrics))
    sentences += describe_samples(read_lines(run_dir / "samples.jsonl"))
    names = [name for name, file in FILES.items() if (run_dir / file).exists()]
    sentences += ["", f"{', '.join(names).capitalize()}: {run_dir}", *next_steps(run_dir)]
    print(*(sentence for sentence in sentences if sentence is not None), sep="\n")


def show_responses(rows: list[dict], number: int) -> Iterator:
    """Yield, for each prompt, the response with the highest score and the one with the lowest."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["prompt"]].append(row)
    step, version = rows[0]["training_step"], rows[0]["policy_version"]
    staleness = step - 1 - version
    old = f", {staleness} step{'s' * (staleness > 1)} old" if staleness else ""
    yield f"\nResponses of step {step}, generated by policy version {version}{old}"
    left = number
    for group in groups.values():
        best_first = sorted(group, key=lambda row: row["score"] or 0, reverse=True)
        shown = (best_first[:1] + best_first[1:][-1:])[:left]
        if not shown:
            break
        left -= len(shown)
        yield Text(f"\n{end_of_prompt(group[0])}", "bold")
        yield from summary.show_truth(group[0])
        if len(group) > 1:
            yield "Scores: " + " ".join(summary.show_score(row["score"]) for row in group)
        for row in shown:
            yield summary.show_figures(row)
            answer = summary.both_ends(summary.printable(text_of(row)), LETTERS)
            yield Padding(answer, (0, 0, 0, 2), expand=False)
    shown = f"\n{number - left} of {len(rows)} responses are shown (--responses {number})"
    yield f"{shown}. report.py shows all steps"


def show_run(run_dir: Path, args: dict, metrics: list[dict], number: int) -> Iterator:
    yield f"{args['run_name']}: {args['exp_name']}, {args['model_name_or_path']}"
    yield shlex.join(args.get("provenance", {}).get("command", []))
    if not metrics:
        yield "No step has finished yet"
        return
    yield "\n".join(["", *lines_of_table([Run(args["run_name"], metrics, args)]), ""])
    yield from summary.describe_run(run_dir, args, metrics)
    steps = read_rollouts(run_dir)
    if steps:
        yield from show_responses([json.loads(row) for row in steps[max(steps)]], number)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="Folder of the run.")
    at_end = "Print the summary that the scripts print at the end of a run."
    parser.add_argument("--summary", action="store_true", help=at_end)
    responses = "Number of responses to show, up to two for each prompt (default 8)."
    parser.add_argument("--responses", type=int, default=8, metavar="N", help=responses)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    if not (run_dir / "args.json").is_file():
        parser.error(f"{run_dir} is not the folder of a run, because it has no args.json")
    args, metrics = read_args(run_dir), read_metrics(run_dir)
    if options.summary and not metrics:
        parser.error(f"{run_dir} has no metrics.jsonl yet, because the run has finished no step")
    if options.summary:
        print_summary(run_dir, metrics)
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(*show_run(run_dir, args, metrics, options.responses), sep="\n")


if __name__ == "__main__":
    main()
