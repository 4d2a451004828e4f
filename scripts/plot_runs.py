"""Draw the curves of a run, or compare several runs in a picture and a table.

Only metrics.jsonl is needed, and while a run trains it has the steps so far.
Your own metrics are drawn after those of the scripts.

    # curves.png in the run's folder, which is replaced
    python scripts/plot_runs.py output/RUN
    # several runs: comparison.png in this folder, and a table on the terminal
    python scripts/plot_runs.py output/A output/B
    # over the seconds that they took
    python scripts/plot_runs.py output/A output/B --x seconds
    # token_length.png in the run's folder: the lengths of its prompts
    python scripts/plot_runs.py output/RUN --lengths
"""

from pathlib import Path

from internal.run_curves import X_AXES, draw_curves, draw_lengths, lines_of_table, read_runs, save
from internal.run_files import make_parser


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="Folders of runs.")
    add("--x", choices=X_AXES, default="step", help="The x axis (default: step).")
    output = "Picture to write (.png, .svg or .pdf). Default: curves.png or comparison.png."
    add("--output", type=Path, metavar="FILE", help=output)
    replace = "Replace an existing picture. curves.png is always replaced."
    add("--overwrite", action="store_true", help=replace)
    lengths = "Draw only the lengths of a run's prompts, as the scripts do."
    add("--lengths", action="store_true", help=lengths)
    args = parser.parse_args()
    run_dirs = [run.expanduser() for run in args.runs]
    if args.lengths:
        draw_lengths(run_dirs[0])
        return
    default = run_dirs[0] / "curves.png" if len(run_dirs) == 1 else Path("comparison.png")
    output = (args.output or default).expanduser()
    runs = read_runs(run_dirs)
    for run_dir, run in zip(run_dirs, runs, strict=True):
        if not run.metrics:
            parser.error(f"{run_dir} has no metrics.jsonl with a step; name the folder of a run")
    if output.exists() and not args.overwrite and output.name != "curves.png":
        parser.error(f"{output} exists; replace it with --overwrite, or name another by --output")
    try:
        save(draw_curves(runs, args.x).savefig, output)
    except (OSError, ValueError) as error:  # there is no such folder or kind of picture
        parser.error(f"--output {output}: {error}")
    print(f"Wrote {output}")
    if len(runs) > 1:
        print(*lines_of_table(runs), sep="\n")


if __name__ == "__main__":
    main()
