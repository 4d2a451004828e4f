"""Where tests stand in the way of the scripts' functions: the hooks, all in one place.

accumulate_gradients    before_update, after_gradients
compute_metrics         with_each_batch (ppo_vllm_async.py: batch_metrics)
load_model              at_each_loading
lr_multiplier           multiply_learning_rate
torch.optim             before_each_optimizer_step
save_file               leave_out
VLLM.start              after_engine_start (ppo_vllm_async.py: VLLM.__init__)
VLLM.send               around_each_send (ppo_vllm_async.py: VLLM.submit)
VLLM.receive            around_each_receive (ppo_vllm_async.py has none)
sync_weights            before_each_sync (ppo_vllm_async.py: VLLM.sync_weights)
queue                   count_queues
VLLM, generation_thread, receive_rollout, end_at_once, call_worker
                        loops.py has stubs in their place

What a hook needs of a call it takes by the name of the parameter: a script may reorder its
parameters, and have others besides. A hook lasts as long as the process, or as long as a test where
it is set with put=monkeypatch.setattr; before_each_optimizer_step is a context.
"""

import contextlib
import functools
import inspect
import queue
from types import SimpleNamespace

from torch.optim.optimizer import register_optimizer_step_pre_hook


def around(owner, name, instead, put=setattr):
    """Puts instead(call, given) in the place of owner.name.

    given: {parameter: argument}, which instead may change; call() goes on with it.
    """
    function = getattr(owner, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def hooked(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        return instead(lambda: function(*bound.args, **bound.kwargs), bound.arguments)

    put(owner, name, hooked)


def before_update(script, do, put=setattr):
    """do(rows, accelerator, args) before the gradients of each optimizer batch."""

    def instead(call, given):
        do(given["mini_batch"], given["accelerator"], given["args"])
        return call()

    around(script, "accumulate_gradients", instead, put)


def multiply_learning_rate(script, factor, put=setattr):
    """Every learning rate of the schedule is the base rate times this."""
    around(script, "lr_multiplier", lambda call, given: factor, put)


def after_gradients(script, do, put=setattr):
    """do(accelerator) when the gradients of an optimizer batch are there, before its update."""

    def instead(call, given):
        result = call()
        do(given["accelerator"])
        return result

    around(script, "accumulate_gradients", instead, put)


def with_each_batch(script, do, put=setattr):
    """do(batch, args) with each step's batch, when it is complete.

    It is complete when the metrics are made of it: GRPO's may get its log-probabilities in the
    update. Whatever the script, it has prompt_ids and responses.
    """

    def instead(call, given):
        batch = given["batch"]
        if hasattr(batch, "sequences"):
            prompt_ids, responses = map(list, zip(*batch.sequences, strict=True))
            batch = SimpleNamespace(**vars(batch), prompt_ids=prompt_ids, responses=responses)
        do(batch, given["args"])
        return call()

    metrics = "compute_metrics" if hasattr(script, "compute_metrics") else "batch_metrics"
    around(script, metrics, instead, put)


def at_each_loading(script, do, put=setattr):
    """do() before a model is loaded, its weights included."""

    def instead(call, given):
        if given.get("device_map") != "meta":
            do()
        return call()

    around(script, "load_model", instead, put)


@contextlib.contextmanager
def before_each_optimizer_step(do):
    """do(optimizer) before each step of any optimizer of torch."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: do(optimizer))
    try:
        yield
    finally:
        hook.remove()


def leave_out(script, tensor, put=setattr):
    """Weights that go to vLLM by file go without this tensor."""

    def instead(call, given):
        weights = given["tensors"]
        given["tensors"] = {name: value for name, value in weights.items() if name != tensor}
        return call()

    around(script, "save_file", instead, put)


def after_engine_start(script, do, put=setattr):
    """do(engine) when its process has been started."""

    def instead(call, given):
        call()
        do(given["self"])

    around(script.VLLM, "start" if hasattr(script.VLLM, "start") else "__init__", instead, put)


def around_each_send(script, instead, put=setattr):
    """instead(call, given); given["function"] is what the process of given["self"] will run."""
    around(script.VLLM, "send" if hasattr(script.VLLM, "send") else "submit", instead, put)


def around_each_receive(script, instead, put=setattr):
    """instead(call, given); call() returns what the process of given["self"] has answered."""
    around(script.VLLM, "receive", instead, put)


def before_each_sync(script, do, put=setattr):
    """do(weights, version) before the policy's weights go to vLLM."""

    def instead(call, given):
        if "self" in given:  # of class VLLM: what it gets has no PolicyModel around it
            weights = given["model"].state_dict(prefix="model.")
        else:
            weights = given["accelerator"].unwrap_model(given["policy"]).state_dict()
        do(weights, given["version"])
        return call()

    owner = script if hasattr(script, "sync_weights") else script.VLLM
    around(owner, "sync_weights", instead, put)


def count_queues(script, queue_class, put=setattr):
    """The script's queues are of this class."""
    put(script, "queue", SimpleNamespace(Queue=queue_class, Empty=queue.Empty))
