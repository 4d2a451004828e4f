"""What is ppo_vllm_async.py's own in the way that tests start a script and watch it."""

from helpers import hooks


def is_crash_only(script):
    """Whether a script ends as ppo_vllm_async.py does; the others are of the older text."""
    return hasattr(script, "end_at_once")


def run_as_main(script):
    """Does what `python SCRIPT` does."""
    if not is_crash_only(script):
        script.main()
        return
    args = script.tyro.cli(script.Args)
    try:
        script.main(args)
    except BaseException as error:
        script.end_at_once(error)


def before_each_sample(script, do):
    """do(prompts) before vLLM samples: for the batch of a step, and then for its evaluation."""

    def instead(call, given):
        do(given["prompts"])
        return call()

    hooks.around(script.VLLM, "sample", instead)
