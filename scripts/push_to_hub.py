"""Upload a run's model to the Hugging Face Hub, with a card on how it was trained.

    python scripts/push_to_hub.py output/RUN
    python scripts/push_to_hub.py output/RUN --repo_id me/name --private
    # show the files and the card that would be uploaded; needs no login
    python scripts/push_to_hub.py output/RUN --dry_run

It uploads the model to a branch of the repo, with README.md (the card),
curves.png, args.json and metrics.jsonl. Repo and branch are those of the run's
--hf_entity, --hf_repo_id and --hf_repo_revision. By default the repo has the
name of the experiment, and the branch the name of the run. Log in with
`hf auth login`, or set HF_TOKEN. Nothing in the run's folder changes. After a
failure, repeat the command. At the end it prints Python code that loads the
model.
"""

import json
import os
import shlex
import sys
import textwrap
from pathlib import Path

from internal.model_paths import may_be_on_the_hub
from internal.provenance import repo_of
from internal.run_files import make_parser, read_args, read_metrics
from requests.utils import get_netrc_auth

RUN_FILES = ("curves.png", "args.json", "metrics.jsonl")  # uploaded in addition to the model
HUB_TIMEOUT = 60  # seconds without an answer of the Hub; without a limit the client waits forever
CARD = Path(__file__).parent / "internal/model_card.jinja"


def method_of(args: dict) -> str:
    """Return how a run was trained, according to arguments that only its script has."""
    if "value_learning_rate" in args:
        return "PPO"
    return "GRPO" if "number_samples_per_prompt" in args else "reward model"


def find_tracked(args: dict) -> str | None:
    """Return the address of the newest run with this name in Weights & Biases.

    Return None if it was not tracked online, or if there is no login, for which wandb would ask.
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
    except Exception as error:  # a card without the link is good enough
        print(f"The card has no link to Weights & Biases: {type(error).__name__}: {error}")
        return None


def lines_that_load(run_dir: Path, args: dict, repo: str, revision: str) -> str:
    """Return lines of Python that load the model from its branch and use it."""
    task, call = "text-generation", f'"...", max_new_tokens={args.get("response_length")}'
    if method_of(args) == "reward model":  # whose score is the logit itself
        task, call = "text-classification", '"...", function_to_apply="none"'
    elif (run_dir / "model/chat_template.jinja").exists():
        call = call.replace('"..."', '[{"role": "user", "content": "..."}]')
    return f"""from transformers import pipeline

model = pipeline("{task}", "{repo}", revision="{revision}")
print(model({call}))
"""


def facts_of(args: dict, last: dict) -> dict[str, str | None]:
    """Return the table of a card. last: the last line of the run's metrics."""
    steps = args.get("num_training_steps") or args["num_updates"]
    rank, provenance = args.get("lora_rank"), args.get("provenance", {})
    versions = [f"{name} {version}" for name, version in provenance.get("versions", {}).items()]
    return {
        "base model": args["model_name_or_path"],
        "adapter": f"LoRA, rank {rank}, alpha {args['lora_alpha']}; merged" if rank else None,
        "dataset": args["dataset"],
        "evaluated on": args["eval_dataset"],
        "steps": f"{last['training_step']:.0f} of {steps}",
        "minutes": f"{last['time/from_scratch'] / 60:.1f}",
        "seed": str(args["seed"]),
        "tracked": find_tracked(args),
        "commit": provenance.get("commit"),
        "script's SHA-256": provenance.get("script_sha256"),
        "versions": ", ".join(versions),
        "GPUs": provenance.get("gpu"),
    }


def make_card(run_dir: Path, args: dict, repo: str, revision: str) -> str:
    """Return the text of the model card, including its metadata."""
    from huggingface_hub import ModelCard, ModelCardData

    metrics, method = read_metrics(run_dir), method_of(args)
    config = json.loads((run_dir / "model/config.json").read_bytes())
    base, dataset = args["model_name_or_path"], args["dataset"]
    data = ModelCardData(
        base_model=base if may_be_on_the_hub(base) else None,
        datasets=[dataset] if may_be_on_the_hub(dataset) else None,
        library_name="transformers",
        pipeline_tag="text-classification" if method == "reward model" else "text-generation",
        tags=[config["model_type"], "rlhf", method.lower().replace(" ", "-")],
    )
    evaluations = [line for line in metrics if any(name.startswith("eval/") for name in line)]
    card = ModelCard.from_template(
        data,
        template_str=CARD.read_text("utf-8"),
        args=args,
        method=method,
        facts=facts_of(args, metrics[-1]),
        evaluations=[*evaluations[:1], *evaluations[1:][-1:]],
        has_curves=(run_dir / "curves.png").exists(),
        call=lines_that_load(run_dir, args, repo, revision),
        command=shlex.join(args.get("provenance", {}).get("command", [])),
    )
    return f"{card.content}\n"


def gather(run_dir: Path, card: str) -> dict[str, Path | bytes]:
    """Return {name in the repo: a file of the run, or the card}."""
    files = {str(path.relative_to(run_dir / "model")): path for path in run_dir.glob("model/**/*")}
    files |= {name: run_dir / name for name in RUN_FILES}
    files = {name: path for name, path in files.items() if path.is_file()}
    # The card replaces the model's README.md. A name in it can be invalid Unicode
    return files | {"README.md": card.encode(errors="replace")}


def upload(run_dir: Path, args: dict, repo: str, revision: str, options) -> None:
    """Upload to the branch, and create it and the repo if necessary. A dry run only shows this."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_session

    if options.dry_run:
        repo = repo if "/" in repo else f"LOGIN/{repo}"  # the login is not known yet
        card = make_card(run_dir, args, repo, revision)
        print(f"These files would be uploaded to {repo}, branch {revision}:")
        print(*sorted(gather(run_dir, card)), sep="\n")
        default = "public unless its owner's default is different (see --private)"
        visibility = "private" if options.private else default
        print(f"A new repo would be {visibility}.\n\nREADME.md:\n\n{card}", end="")
        return
    get_session().timeout = HUB_TIMEOUT
    hub = HfApi()
    repo = hub.create_repo(repo, private=options.private or None, exist_ok=True).repo_id
    hub.create_branch(repo, branch=revision, exist_ok=True)
    files = gather(run_dir, make_card(run_dir, args, repo, revision))
    files = [CommitOperationAdd(name, file) for name, file in files.items()]
    message = f"Upload {args['run_name']}"
    hub.create_commit(repo, files, commit_message=message, revision=revision)
    print(f"Uploaded to {hub.endpoint}/{repo}/tree/{revision}")
    print(f"To load it:\n\n{lines_that_load(run_dir, args, repo, revision)}", end="")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="Folder of the run.")
    parser.add_argument("--repo_id", help="Repo, such as me/name.")
    parser.add_argument("--revision", help="Branch of the repo.")
    private = "Make a new repo private. An existing repo does not change."
    parser.add_argument("--private", action="store_true", help=private)
    dry_run = "Show the files and the card without uploading. Needs no login."
    parser.add_argument("--dry_run", action="store_true", help=dry_run)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    for name in ("args.json", "metrics.jsonl", "model/config.json"):
        if not (run_dir / name).is_file():
            parser.error(f"{run_dir} is not the folder of a finished run, because it has no {name}")
    args = read_args(run_dir)
    repo = options.repo_id or repo_of(args, args.get("hf_entity"))
    revision = options.revision or args.get("hf_repo_revision") or args["run_name"]
    try:
        upload(run_dir, args, repo, revision, options)
    except Exception as error:  # the client raises errors of several libraries
        # An error can name only the file, and its cause what is wrong
        reason = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
        reason = textwrap.shorten(reason, 300, placeholder=" ...")
        command = shlex.join([sys.executable, *sys.argv])
        parser.exit(1, f"The upload to {repo} failed: {reason}\nTo try again: {command}\n")


if __name__ == "__main__":
    main()
