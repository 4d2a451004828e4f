"""Uploads a run's model to the Hugging Face hub, with a card that says how it
was made.

    python scripts/push_to_hub.py output/RUN
    python scripts/push_to_hub.py output/RUN --repo_id me/name --private
    # what would be uploaded: files, card; without a login
    python scripts/push_to_hub.py output/RUN --dry_run

The model goes into a branch of the repo, beside it README.md (the card),
curves.png, args.json and metrics.jsonl. Repo and branch are those of the run's
--hf_entity, --hf_repo_id and --hf_repo_revision; else the repo has the name of
the experiment and the branch that of the run. Log in by `hf auth login`, or set
HF_TOKEN. Nothing in the run's folder is changed. After a failure the same
command goes on. At the end the lines of Python are printed that load the model.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

from plot_runs import read_metrics
from provenance import repo_of
from requests.utils import get_netrc_auth

BESIDES = ("curves.png", "args.json", "metrics.jsonl")  # what goes up besides the model
SILENCE = 60  # seconds that the hub may say nothing; the client would wait for ever
NOT_SHOWN = {"eval/policy_version", "eval/reward_failures"}

LOAD = """\
from transformers import {model_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}", revision="{revision}")
model = {model_class}.from_pretrained("{repo}", revision="{revision}")
"""
CHAT = """\
messages = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
TEXT = 'inputs = tokenizer("...", return_tensors="pt")'
ANSWER = """
answer = model.generate(**inputs, max_new_tokens={length})
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :]))"""
SCORE = "\nscore = model(**inputs).logits[0, 0]"


# ------------------------------------------------------------------------------------------- card


def is_hub_id(name: str | None) -> bool:
    """Whether a model's or dataset's name is one of the hub, and not of a file or folder here.

    >>> [is_hub_id(name) for name in ("Qwen/Qwen2.5-0.5B", "data/train.parquet", "/models/a", None)]
    [True, False, False, False]
    """
    if name is None or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return False
    return Path(name).suffix not in (".parquet", ".jsonl", ".json") and not Path(name).exists()


def method_of(args: dict) -> str:
    """How a run trained, by the arguments that only its script has."""
    if "value_learning_rate" in args:
        return "PPO"
    return "GRPO" if "number_samples_per_prompt" in args else "reward model"


def figures(metrics: list[dict]) -> str:
    """A table of the first and the last evaluation; empty where there was none.

    An evaluation is of the policy before the update of its line, but for the last one.

    >>> before = {"eval/policy_version": 0, "eval/verifiable_correct_rate": 0.5}
    >>> after = {"eval/policy_version": 40, "eval/verifiable_correct_rate": 0.92}
    >>> print(figures([before, {"lr": 1e-6}, after]))
    | held-out prompts | after step 0 | after step 40 |
    |---|---|---|
    | `verifiable_correct_rate` | 0.5 | 0.92 |
    """
    evaluations = [line for line in metrics if any(name.startswith("eval/") for name in line)]
    if not evaluations:
        return ""
    shown = [evaluations[0], evaluations[-1]][-len(evaluations) :]
    steps = [line.get("eval/policy_version", line.get("training_step")) for line in shown]
    rows = [["held-out prompts", *(f"after step {step:.0f}" for step in steps)]]
    for name in shown[-1]:
        if name.startswith("eval/") and name not in NOT_SHOWN:
            values = [f"{line[name]:.4g}" if name in line else "" for line in shown]
            rows.append([f"`{name.removeprefix('eval/')}`", *values])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    """A table in Markdown, the first row of which is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def facts(args: dict, metrics: list[dict]) -> str:
    """A table of what the model was made from and with."""
    made, last = args.get("provenance", {}), metrics[-1]
    versions = ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items())
    steps = f"{last['training_step']:.0f} of {args.get('num_training_steps', args['num_updates'])}"
    adapter = None
    if args.get("lora_rank"):
        adapter = f"LoRA, rank {args['lora_rank']}, alpha {args['lora_alpha']}; merged"
    rows = {
        "base model": f"`{args['model_name_or_path']}`",
        "adapter": adapter,
        "dataset": name_of_data(args["dataset"], args["dataset_split"]),
        "evaluated on": name_of_data(args["eval_dataset"], args["eval_dataset_split"]),
        "steps": f"{steps}, in {last['time/from_scratch'] / 60:.1f} minutes",
        "seed": str(args["seed"]),
        "commit": made.get("commit"),
        "script's SHA-256": made.get("script_sha256"),
        "versions": versions,
        "GPUs": made.get("gpu") or ("none" if made else None),
        "tracked": find_tracked(args),
    }
    return table([["", ""], *([name, value] for name, value in rows.items() if value)])


def find_tracked(args: dict) -> str | None:
    """The address of the run in Weights & Biases: the newest of its name.

    None: it was not tracked, or not online, or nobody is logged in (wandb would ask for a login).
    """
    is_online = os.environ.get("WANDB_MODE", "online") == "online"
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    key = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
    if not (args.get("with_tracking") and is_online and key):
        return None
    try:
        import wandb

        api = wandb.Api(timeout=10)
        project = f"{args['wandb_entity'] or api.default_entity}/{args['wandb_project_name']}"
        name = {"display_name": args["run_name"]}
        return api.runs(project, filters=name, order="-created_at", per_page=1)[0].url
    except Exception as error:  # the card can do without
        print(f"No link to Weights & Biases: {type(error).__name__}: {error}")
        return None


def name_of_data(name: str | None, split: str) -> str | None:
    """A dataset as a card names it; only those of the hub have splits.

    >>> name_of_data("data/train.parquet", "train"), name_of_data("openai/gsm8k", "train")
    ('`data/train.parquet`', '`openai/gsm8k`, split `train`')
    """
    if name is None:
        return None
    return f"`{name}`, split `{split}`" if is_hub_id(name) else f"`{name}`"


def in_lines(command: list[str]) -> str:
    r"""A command for a shell, a line for each flag.

    >>> print(in_lines(["python", "ppo_sync.py", "--run_name", "a run", "--seed", "2"]))
    python ppo_sync.py \
      --run_name 'a run' \
      --seed 2
    """
    words = [shlex.quote(word) for word in command]
    return " ".join(f"\\\n  {word}" if word.startswith("--") else word for word in words)


def lines_that_load(args: dict, repo: str, revision: str) -> str:
    """Lines of Python that load tokenizer and model from the branch."""
    is_classifier = method_of(args) == "reward model"
    model_class = f"AutoModelFor{'SequenceClassification' if is_classifier else 'CausalLM'}"
    return LOAD.format(model_class=model_class, repo=repo, revision=revision)


def make_card(run_dir: Path, args: dict, repo: str, revision: str) -> str:
    """The text of the model card, metadata included."""
    from huggingface_hub import ModelCard, ModelCardData

    metrics, method = read_metrics(run_dir), method_of(args)
    config = json.loads((run_dir / "model/config.json").read_bytes())
    data = ModelCardData(
        base_model=args["model_name_or_path"] if is_hub_id(args["model_name_or_path"]) else None,
        datasets=[args["dataset"]] if is_hub_id(args["dataset"]) else None,
        library_name="transformers",
        pipeline_tag="text-classification" if method == "reward model" else "text-generation",
        tags=[config["model_type"], "rlhf", method.lower().replace(" ", "-")],
    )
    what = f"Trained by {method}"
    call = CHAT if (run_dir / "model/chat_template.jinja").exists() else TEXT
    call += ANSWER.format(length=args.get("response_length"))
    if method == "reward model":
        what, call = "A reward model, trained", TEXT + SCORE
    parts = [
        f"---\n{data.to_yaml().strip()}\n---",
        f"# {args['run_name']}",
        f"{what} with Tandem. The experiment is called `{args['exp_name']}`.",
        facts(args, metrics),
    ]
    if figures(metrics):
        parts += ["## Figures", figures(metrics)]
        if "eval_temperature" in args:
            parts.append(f"Answers were sampled at temperature {args['eval_temperature']:g}.")
    if (run_dir / "curves.png").exists():
        parts.append("![Curves of the run](curves.png)")
    load = lines_that_load(args, repo, revision)
    parts += ["## Use", f"```python\n{load}{call}\n```"]
    if "provenance" in args:
        parts += ["## Command", f"```bash\n{in_lines(args['provenance']['command'])}\n```"]
    parts.append("`args.json` has all flags, `metrics.jsonl` the metrics of each step.")
    return ModelCard("\n\n".join(parts) + "\n").content


# ----------------------------------------------------------------------------------------- upload


def gather(run_dir: Path, folder: Path, card: str) -> None:
    """Puts into an empty folder what is to be uploaded: the card, and links to the run's files."""
    files = {path.relative_to(run_dir / "model"): path for path in run_dir.glob("model/**/*")}
    files |= {Path(name): run_dir / name for name in BESIDES}
    for name, path in files.items():
        if path.is_file() and name != Path("README.md"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())
    (folder / "README.md").write_bytes(card.encode(errors="replace"))


def show(run_dir: Path, args: dict, repo: str, revision: str, private: bool | None) -> None:
    """Prints what would be uploaded: files with their bytes, and the card. It asks no hub."""
    if "/" not in repo:
        repo = f"LOGIN/{repo}"  # who will be logged in
    card = make_card(run_dir, args, repo, revision)
    print(f"Would be uploaded to {repo}, branch {revision}:")
    with tempfile.TemporaryDirectory() as folder:
        gather(run_dir, Path(folder), card)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                print(f"{path.stat().st_size:18,}  {path.relative_to(folder)}")
    default = "public, unless its owner's default is another (--private)"
    print(f"A repo that does not exist is made: {'private' if private else default}.")
    print(f"\nREADME.md:\n\n{card}", end="")


def upload(
    run_dir: Path, args: dict, repo: str, revision: str, private: bool | None
) -> tuple[str, str]:
    """Makes repo and branch where they are missing, and uploads.

    Returns the repo's name with its owner's, and the branch's address.
    """
    from huggingface_hub import HfApi, get_session

    get_session().timeout = SILENCE
    hub = HfApi()
    repo = hub.create_repo(repo, private=private, exist_ok=True).repo_id  # with the owner's name
    hub.create_branch(repo, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        gather(run_dir, Path(folder), make_card(run_dir, args, repo, revision))
        hub.upload_folder(
            repo_id=repo,
            revision=revision,
            folder_path=folder,
            commit_message=f"Upload {args['run_name']}",
        )
    return repo, f"{hub.endpoint}/{repo}/tree/{revision}"


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--repo_id", help="the repo, such as me/name")
    parser.add_argument("--revision", help="the branch")
    hidden = "a new repo is seen by its owner alone; one that exists stays what it is"
    parser.add_argument("--private", action="store_true", help=hidden)
    dry_run = "show files and card, upload nothing; no login is needed"
    parser.add_argument("--dry_run", action="store_true", help=dry_run)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    for name in ("args.json", "metrics.jsonl", "model/config.json"):
        if not (run_dir / name).is_file():
            parser.error(f"{run_dir} has no {name}: it is no finished run")
    args = json.loads((run_dir / "args.json").read_bytes())
    repo = options.repo_id or repo_of(args, args.get("hf_entity"))
    revision = options.revision or args.get("hf_repo_revision") or args["run_name"]
    given = (run_dir, args, repo, revision, options.private or None)
    if options.dry_run:
        show(*given)
        return
    try:
        repo, address = upload(*given)
    except Exception as error:  # the client's own, of several libraries
        # The client's own error may name the file alone, and its cause say what is wrong
        reason = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
        reason = textwrap.shorten(reason, 300, placeholder=" ...")
        command = shlex.join([sys.executable, *sys.argv])
        parser.exit(1, f"Not uploaded to {repo}: {reason}\nTo try again: {command}\n")
    print(f"Uploaded: {address}\nTo load it:\n\n{lines_that_load(args, repo, revision)}", end="")


if __name__ == "__main__":
    main()
