"""Tables of options for scripts/preflight.py, and of its answers. test_preflight.py uses them.

An entry has options, or a function from a folder to them, those of the launch among them, and the
words that its answer has, with bars between; after "!" are words that it has not. The entries are
for the three scripts, or for those that they name. test_mistakes.py has what scripts refuse.
"""

import importlib
import json
import queue
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import preflight
import transformers
import tyro
from helpers import GRPO, LORA, PPO, REPO, SCRIPTS
from helpers.files import write_rows, write_text
from helpers.processes import flags_of

import ppo_sync

TRAINER = ("scripts/train_reward_model.py",)
EVERY = SCRIPTS + TRAINER
FORKS = (*LORA,)
MODEL = REPO / "debug_assets" / "model"

ASK = {"role": "user", "content": "53812="}
SAYS = {"role": "assistant", "content": "12358"}
ROW = {
    "prompt": [ASK],
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
    "extra_info": {"index": 0},
}
PAIR = {"prompt": [ASK], "chosen": "12358", "rejected": "13582"}


def good_options(folder, script):
    """Return options without an error. A step has 64 responses and one update."""
    options = {"model_name_or_path": MODEL, "output_dir": folder / "output", "run_name": "run"}
    if script in TRAINER:
        return options | {"dataset": write_rows(folder / "good.jsonl", [PAIR] * 70)}
    options |= {"dataset": write_rows(folder / "good.jsonl", [ROW] * 70), "response_length": 8}
    options |= {"local_rollout_batch_size": 64, "local_mini_batch_size": 64}
    if script in GRPO:
        options |= {"local_rollout_batch_size": 32, "number_samples_per_prompt": 2}
    return options


def words_of(options):
    """Return options as they are typed."""
    words = []
    for name, value in options.items():
        if name == "vllm_gpus":
            words += ["--vllm_gpus", *value.split()]
        elif isinstance(value, int | float) and value < 0:
            words.append(f"--{name}={value}")  # -1e-06 alone would be a flag to Python's parser
        else:
            words += flags_of({name: value})
    return words


def call_rewards_here(monkeypatch):
    """Let the preflight call rewards in this process, which is fast, and ask no vLLM."""
    load = preflight.load_script

    def load_script(path):
        script = load(path)

        def start_reward_workers(args):
            for flag, function in (("reward_fn", "reward_function"), ("env_fn", "env_function")):
                if name := getattr(args, flag, None):
                    loaded = script.load_function(name, script.read_reward_file(name))
                    setattr(script, function, loaded)
            workers = queue.Queue()
            workers.put((SimpleNamespace(shutdown=lambda: None), 0))
            return workers

        script.start_reward_workers = start_reward_workers
        script.call_worker = lambda workers, response, args: script.call_reward_fn(response)
        return script

    monkeypatch.setattr(preflight, "load_script", load_script)
    monkeypatch.setattr(preflight, "ask_vllm", lambda config, dtype: "")


# ---------------------------------------------------------------------------------------- builders
# Each returns a function from a folder to options.


def rows(*rows, flag="dataset"):
    return lambda folder: {flag: write_rows(folder / "data.jsonl", rows)}


def prompts(*prompts, **columns):
    """Write 70 rows of these prompts in turn, which are messages or texts of a user."""
    messages = [text if isinstance(text, list) else [ASK | {"content": text}] for text in prompts]
    return rows(*[ROW | columns | {"prompt": each} for each in messages] * (70 // len(prompts)))


def truth(answer, **columns):
    return ROW | {"reward_model": {"ground_truth": answer}} | columns


def files(names):
    """Write a folder as the dataset, whose files have 35 prompts each."""

    def make(folder):
        for name in names.split():
            row = ROW | {"prompt": [ASK | {"content": f"{len(name)}="}]}
            write_rows(folder / "data" / name, [row] * 35)
        return {"dataset": folder / "data"}

    return make


def table(folder):
    return {"dataset": write_text(folder / "rows.csv", "prompt,ground_truth\n1=,001\n")}


def call(line):
    """Write a reward function of one line."""
    head = "import time\ndef f(data_source, response, ground_truth, extra_info):\n"
    text = f"{head}    text, truth = response, ground_truth; {line}\n"
    return lambda folder: {"reward_fn": f"{write_text(folder / 'r.py', text)}:f"}


def template(text):
    return lambda folder: {"chat_template": write_text(folder / "t.jinja", text)}


def together(*makes):
    """Join several builders or options."""

    def make(folder):
        return {k: v for it in makes for k, v in (it(folder) if callable(it) else it).items()}

    return make


def model(*changes, flag="model_name_or_path", to="model"):
    """Copy the debug model, and apply these changes to its folder."""

    def make(folder):
        shutil.copytree(MODEL, folder / to)
        for change in changes:
            change(folder / to)
        return {flag: folder / to}

    return make


# Changes of a model's folder


def in_json(name, change):
    def rewrite(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return rewrite


def config(**changes):
    return in_json("config.json", lambda config: config.update(changes))


def without(name):
    return model(lambda folder: (folder / name).unlink())


def swap_digits(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]


def begins_with_user(tokenizer):
    """Add a token to each text, as Llama's tokenizers add <s>, which their templates write too."""
    token = {"id": "<|user|>", "ids": [3], "tokens": ["<|user|>"]}
    single = [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"special_tokens": {"<|user|>": token}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single} | tokens
    tokenizer["post_processor"] = processor


SMALL = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 17}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def architecture(name, **settings):
    """Replace the model by a random one of another architecture. The tokenizer stays."""
    model_class = getattr(transformers, name)
    made = model_class.config_class(**settings or SMALL)
    return lambda folder: model_class(made).save_pretrained(folder)


# ---------------------------------------------------------------------------------------- mistakes

BOTH_KINDS = ROW | PAIR  # a row, and a pair
WITHOUT_WEIGHTS = without("model.safetensors")
BARE = ("tokenizer.json", "model.safetensors")  # two parts cannot read this model
BARE = model(*(lambda folder, name=it: (folder / name).unlink() for it in BARE))
TEN = {"total_episodes": 640}  # updates
# The incorrect answer to a row is another row's ground truth
IS_IN = call("return float(truth in text)")
LATER = call("return 1.0 / (truth != '68')")
UP_TO_70 = [truth(f"{number}") for number in range(70)]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "53812="}]}]
OTHER_IDS = model(in_json("tokenizer.json", swap_digits), flag="tokenizer_name_or_path")
AHEAD = {"num_labels": 1, "is_causal": False} | SMALL
AHEAD = model(architecture("Qwen2ForSequenceClassification", **AHEAD))
NINE = model(architecture("Qwen2ForCausalLM", **SMALL | {"vocab_size": 9}))
MIXTURE = architecture("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=8, **SMALL)
TOO_SMALL = SMALL | {"vocab_size": 16, "num_labels": 1}
TOO_SMALL = architecture("Qwen2ForSequenceClassification", **TOO_SMALL)
JUDGE = model(TOO_SMALL, flag="reward_model_path", to="judge")
CRITIC = model(TOO_SMALL, flag="value_model_path", to="critic")
SYSTEM = {"role": "system", "content": "1"}


TO_USERS = "{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}"
TO_USERS = template("{% for m in messages %}" + TO_USERS + "{% endfor %}<|assistant|>")
COUNTS = template("<|user|>{{ messages | length }}=")
ROOM = {"num_processes": 2, "num_gpus": 8, "gpu_memory": 80.0}  # two learners


def placed(gpus, size=1):
    return ROOM | {"vllm_gpus": gpus, "vllm_tensor_parallel_size": size}


SHARDED = REPO / "scripts" / "accelerate" / "fsdp2.yaml"
ONE_GPU = SHARDED.with_name("one_gpu.yaml")
ONE, TWO, EIGHT = ({"num_gpus": count, "gpu_memory": 80.0} for count in (1, 2, 8))
ONE_PROCESS = EIGHT | {"num_processes": 8, "config_file": ONE_GPU}
PAIRS_OF_FSDP = {"config_file": SHARDED, "local_mini_batch_size": 8}
LEARNER = {"vllm_gpus": "1", "micro_batch_tokens": 32_512, "response_length": 500}
LEARNER |= {"gradient_checkpointing": False, "num_gpus": 2, "gpu_memory": 2.25}
HELP = "a learner needs about 0.3 GiB of its GPU, but can use 0.2 GiB; with these flags it fits: | "
HELP += "--gradient_checkpointing (learner: 0.1 GiB of 0.2 GiB)"


def last(**columns):
    """Write 70 rows that are also pairs, and one more."""
    return rows(*[BOTH_KINDS] * 70, BOTH_KINDS | columns)


WARM = {"value_warmup_steps": 9, "warm_up_steps": 2, "total_episodes": 640}
# One line has the words, and there is no other line
MISTAKES = {
    # In the words of a script, or of a library
    "no file": (
        {"dataset": "none.parquet"},
        "--dataset none.parquet: no such file or folder",
        EVERY,
    ),
    "no truth": (rows(ROW, ROW | {"reward_model": {}}), "row 1: | `ground_truth` | docs/data.md"),
    "no folder": ({"model_name_or_path": "x/y/z"}, "--model_name_or_path x/y/z: no such", EVERY),
    "a mixture": (model(MIXTURE), "is a mixture of experts, whose weight sync failed"),
    "reward fails late": (together(LATER, rows(*UP_TO_70)), "row 68: | answer '68' | ZeroDivision"),
    # Data
    "empty": (rows(), "data.jsonl | empty", EVERY),
    "messages as text": (
        last(prompt=json.dumps([ASK])),
        "row 70: the prompt is the text of",
        EVERY,
    ),
    "rows of another format": (table, "--dataset | read from .jsonl and .parquet files", EVERY),
    "parts": (last(prompt=PARTS), "row 70: a content is a list of parts", EVERY),
    "system passed over": (
        together(last(prompt=[SYSTEM, ASK]), TO_USERS),
        "row 70: | the chat template leaves out the message of the 'system'",
        EVERY,
    ),
    "all passed over": (together(COUNTS, last()), "row 0: | leaves out the message of the 'user'"),
    "words are lost": (prompts("1 2 3 4 5="), "the spaces between | TokenizersBackend"),
    "too few pairs": ({"local_mini_batch_size": 80}, "0 updates of 80 | --num_train_ep", TRAINER),
    "split of a file": ({"dataset_split": "train[:6]"}, "no split train[:6] in their names", EVERY),
    "split of a folder": (
        together(files("a.jsonl b.jsonl"), {"dataset_split": "val"}),
        "--dataset | no split val in their names",
    ),
    # Models and tokenizers
    "no weights": (WITHOUT_WEIGHTS, "no weights, such as model.safetensors | --num_gpus", EVERY),
    "no tokenizer": (BARE, "--model_name_or_path | no tokenizer, such as", EVERY),
    "another shape": (model(config(intermediate_size=7)), "down_proj.weight | [64, 7]", EVERY),
    "BERT": (model(architecture("BertForMaskedLM")), "BertForMaskedLM | decoder"),
    "too few positions": ({"response_length": 512}, "--response_length | positions | 512"),
    "ids of another": (OTHER_IDS, "--tokenizer_name_or_path | misread 2 tokens"),
    "tokenizer of another": (NINE, "tokenizer | 17 | 9"),
    "reward model of fewer ids": (JUDGE, "--reward_model_path | vocab_size is 16, too"),
    "value model of fewer ids": (CRITIC, "--value_model_path | vocab_size is 16, too", PPO),
    "a bias": (model(architecture("PhiForCausalLM")), "the head's bias would not be trained"),
    "classifier that looks ahead": (AHEAD, "attends to later tokens", TRAINER),
    "classifier without a head": ({"reward_model_path": MODEL}, "--reward_model_path | 0 labels"),
    # Rewards and numbers
    "empty truth": (
        together(IS_IN, rows(ROW, truth(""), truth(""))),
        "row 1: | empty, so any answer counts as correct: '12358'",
    ),
    "no reward": ({"apply_verifiable_reward": False}, "--apply_verifiable_reward, --add_r1"),
    "warm-up alone": (
        {"warm_up_steps": 10, "total_episodes": 640},
        "must be less | which are 10; raise",
    ),
    "warm-up of values": (WARM, "--warm_up_steps 2 must | which are 1;", PPO),
    "a home": ({"output_dir": "~/runs"}, "--output_dir ~/runs: no shell expands ~", EVERY),
    "a home in a path": ({"dataset": "~/a.jsonl"}, "--dataset ~/a.jsonl: no shell", EVERY),
    "stop token": ({"stop_token": "<x>"}, "--stop_token <x>: the tokenizer has no such", EVERY),
    "seed": ({"seed": -1}, "--seed is -1; it must be at least 0"),
    "response": ({"response_length": 0}, "--response_length is 0; | at least 1"),
    "not a number": ({"beta": "nan"}, "--beta is nan"),
    # The launch
    "below a file": ({"output_dir": MODEL / "config.json" / "x"}, "no folder to write to", EVERY),
    "too few GPUs": ({"num_gpus": 2, "num_processes": 4}, "4 learners | a node has 2"),
    "no such GPU": ({"num_gpus": 8, "vllm_gpus": "7 8"}, "--vllm_gpus (7, 8) | a node has 8"),
    "adapters in float32": ({"num_gpus": 1, "dtype": "float32"}, "--dtype bfloat16", FORKS),
    "no adapters": ({"lora_rank": 8}, "python scripts/fork.py lora | _lora.py --script"),
    "no rank": ({"lora_rank": 0}, "--lora_rank is 0; it must be at least 1", FORKS),
    "a learner's GPU": (placed("1 2"), "--vllm_gpus (1, 2) | not the first 2"),
    "a GPU twice": (placed("2 2"), "--vllm_gpus (2, 2) | each named once"),
    "half an engine": (placed("2 3 4", 2), "(2, 3, 4) | --vllm_tensor_parallel_size (2) for each"),
    "engines of nobody": (placed("2 3 4"), "no more engines than learners"),
    "no GPUs for many": (ROOM | {"vllm_tensor_parallel_size": 2}, "--vllm_gpus () | (2) for each"),
    "ranks of one process": (
        ONE_PROCESS,
        "--num_processes is 8 | one_gpu.yaml starts one | ddp.yaml",
    ),
    "sharded pairs": (PAIRS_OF_FSDP, "if the script shards models, fsdp2.yaml", TRAINER),
    "memory": (LEARNER, HELP),
    "memory of nothing": ({"num_gpus": 1, "gpu_memory": 0.5}, "a learner needs | no flags make"),
}

# ------------------------------------------------------------------------------- nothing is wrong

USER = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
ENDS = "{% endif %}{% endfor %}"
GENERATE = ENDS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ANSWER = "<|assistant|>{{ m.content }}"
UNPROMPTED, ENDLESS = template(USER + ANSWER + "<|end|>" + ENDS), template(USER + ANSWER + GENERATE)
# Like Qwen3's template, it writes thoughts before an answer, although there are none
THINKS = template(USER + "<|assistant|>= {{ m.content }}<|end|>" + GENERATE)
# A base model, whose end token is not the one that ends the turns of its template
BASE = model(
    config(eos_token_id=0),
    in_json("generation_config.json", lambda settings: settings.update(eos_token_id=0)),
    in_json("tokenizer_config.json", lambda settings: settings.update(eos_token="<|pad|>")),
)
BEGINS = model(
    in_json("tokenizer.json", begins_with_user),
    in_json("tokenizer_config.json", lambda settings: settings.update(bos_token="<|user|>")),
)
TEXTS = rows(*[ROW | {"prompt": "<|user|>1="}] * 70)
SEEN = together(rows(*[ROW] * 70), rows(*[ROW] * 70, flag="eval_dataset"), {"num_eval_prompts": 5})
TWICE = {"prompt": "1=", "chosen": "1=1", "rejected": "1=2"}
TURNED = PAIR | {"chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
IMAGE = {"images": [{"path": "1.png"}]}
LOST = rows(*[ROW, ROW | {"prompt": "5\u00e9\u2028\u20ac4="}] * 35)  # one of them ends a line
UNWRITABLE = rows(*[ROW, truth("5\u00e94")] * 35)
OF_ITS_OWN = together(IS_IN, rows(*[ROW | {"data_source": f"mine/{i}"} for i in range(40)]))
ALIKE = together(rows(*[ROW] * 35, *[truth("5")] * 35), call("return 1.0"))
JUDGED = rows(*[ROW] * 35, *[truth("", data_source="judged")] * 35)
NOTHING_ALONE = {"penalty_reward_value": -1.0, "r1_style_format_reward": "inf"}
MANY = {"local_rollout_batch_size": 16, "number_samples_per_prompt": 4, "total_episodes": 640}
MANY = together(rows(*[truth(f"{n}", prompt=f"{n}=") for n in range(4)]), MANY)
SEVENTY = prompts(*map(str, range(10, 80)))
# A text may be in the prompt in another form, and older answers may be left out
REVERSED = template("{% for m in messages %}<|user|>{{ m.content | trim | reverse }}{% endfor %}")
REVERSED = together(SEVENTY, REVERSED)
OLDER = [ASK, SAYS, {"role": "tool", "content": "1"}, ASK | {"content": "54="}]
OLDER = together(prompts(OLDER, "1="), TO_USERS)
QUIET = "learners 1 ! equal | distinct | ignored | template | left out | begins | stop token"

LINEAR = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
HYBRID = SMALL | LINEAR | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
SEES = {"text_config": HYBRID, "vision_config": EYES | {"out_hidden_size": 32}}

SIX = EIGHT | {"num_processes": 6, "vllm_gpus": "6 7"}
NODES = SIX | {"num_processes": 12, "num_machines": 2}
SHARES = "of 14.8 GiB available | generates 64 of a step's 64 responses at once | policy"

PLANS = {
    # What is odd about rows and the template
    "images": (prompts("1=", "2=", **IMAGE), "the column images is ignored"),
    "equal prompts": (prompts("5\u00e9=", "5\u00e8="), "of 70 prompts all are equal"),
    "repeated prompts": (prompts("1=", "2=", "3=", "1=", "1="), "of 70 prompts 3 are distinct"),
    "begun answers": (prompts([ASK, SAYS], [ASK]), "35 of 70 prompts end with a message of the"),
    "rendered": (prompts("1=", "<|user|>2="), "row 1 (one of 35 in 70): | special token <|user|>"),
    "no generation prompt": (UNPROMPTED, "begin its turn with '<|assistant|>'"),
    "end of a base model": (BASE, "an answer with '<|end|>' | --stop_token '<|end|>'", EVERY),
    "no end": (ENDLESS, "writes nothing after an answer"),
    "texts of a chat model": (TEXTS, "70 of 70 prompts are texts, ! a second time"),
    "two begin tokens": (
        together(BEGINS, TEXTS),
        "row 0 (one of 70 in 70) | adds '<|user|>' a second",
    ),
    "held-out prompts": (
        SEEN,
        "on 5 prompts, and | 5 of the 5 held-out prompts are also in the tr",
    ),
    "prompt in the answers": (rows(*[TWICE] * 70), "70 of 70 responses begin with their", TRAINER),
    "both orders": (rows(*[PAIR, TURNED] * 35), "70 pairs exist in both orders", TRAINER),
    "changed by the template": (REVERSED, "learners 1 ! distinct"),
    "tool's and older answers": (OLDER, "of 70 prompts 2 are distinct"),
    "says nothing": (prompts([SYSTEM, ASK | {"content": ""}], "5="), "35 are dropped as empty"),
    "characters are lost": (
        LOST,
        "row 1 (one of 35 in 70): | of the prompt: '\u00e9\\u2028\u20ac'",
    ),
    "a space is lost": (prompts("1 2="), "these characters of the prompt: ' '"),
    "of a truth": (UNWRITABLE, "row 1 (one of 35 in 70): | of the ground truth: '\u00e9': no"),
    "nothing": (SEVENTY, QUIET),
    "thoughts": (together(SEVENTY, THINKS), QUIET),
    # The reward
    "debug": ({}, "learners 1 | 1 x compute_score | of debug/sorting the ground truth scores 1"),
    "alike": (ALIKE, "row 0, one of 18 such rows among 18 that | no more than"),
    "sources": (OF_ITS_OWN, "of mine/0, mine/1, | mine/9, ... the ground truth scores 1 (1 in"),
    "less than right": (
        call("return 0.95 * (text == truth)"),
        "18 such rows among 18 | less than 1, so",
    ),
    "files of no split": (files("train.jsonl algebra.jsonl a.csv"), "2 files | first a.csv;"),
    "files of other splits": (
        files("train.jsonl test.jsonl dev/0.parquet"),
        "35 prompts ! are not",
    ),
    "files that are no rows": (files("a.jsonl b.jsonl .x/a.jsonl info.md"), "70 prompts ! are not"),
    "more than there are": (
        MANY,
        "epochs 40 of the 4 prompts | takes 16 prompts, but there are 4",
    ),
    "enough": (SEVENTY, "of the 70 prompts ! takes"),
    # Empty ground truths are accepted if a source has no others
    "judged": (
        together(call("return len(text)"), JUDGED),
        "examples of judged the ground truth scores",
    ),
    "a rule": (
        rows(*[truth('{"N": 3}')] * 64),
        "64 such rows among 64 | Ignore this for test cases ! have it",
    ),
    # Steps, flags, models, and the launch
    "steps": (TEN, "steps 10, each on | 16 tokens | 10, which are 1 per step, each on 64"),
    "pairs": ({"local_mini_batch_size": 8}, "8, each on 8 of the 70 pairs | learners 1", TRAINER),
    "lambda": ({"lam": 0.95}, "--lam 0.95 | --value_warmup_steps", PPO),
    "lambda of warm values": ({"lam": 0.95, "value_model_path": MODEL}, "! --lam", PPO),
    "rate of full training": ({"lora_rank": 8, "learning_rate": 1e-6}, "about ten times", FORKS),
    "rank of another GPU": (ONE | {"gpu_memory": 80, "lora_rank": 64}, "48590", FORKS),
    "flags": (NOTHING_ALONE, "--penalty_reward_value does nothing | --r1_style_format_reward does"),
    "no checkpoint is due": (
        TEN | {"save_freq": 50},
        "no checkpoints, because of --save_freq 50,",
    ),
    "disk": (TEN | {"save_freq": 2}, "for 4 checkpoints | 0.3 MiB for the final model"),
    "eyes": (model(architecture("Qwen3_5ForConditionalGeneration", **SEES)), "of policy"),
    "its text model": (model(architecture("Qwen3_5ForCausalLM", **HYBRID)), "of policy"),
    "idle GPUs": (EIGHT, "7 of a node's 8 GPUs are not used"),
    "two for vLLM": (SIX, "learners 6 | engines 2 | GPUs 6, 7 | of 78.0 GiB available"),
    "two machines": (NODES, "learners 12 | engines 4 | steps 130, each", PPO),
    "a shared GPU": (ONE | {"gpu_memory": 24.0}, SHARES),
    "FSDP2": (EIGHT | {"config_file": SHARDED}, "learners 8 | gathered by FSDP2 | a node needs"),
}

# ------------------------------------------------------------------------------------- checkpoints


def options_of_run(folder, script):
    """Return options for ten steps, or for eight updates of a reward model."""
    if script in TRAINER:
        return good_options(folder, script) | {"local_mini_batch_size": 8}
    held_out = write_rows(folder / "eval.jsonl", [truth(f"{number}") for number in range(9)])
    drawn = {"eval_dataset": held_out, "num_eval_prompts": 5}  # a checkpoint has their hash
    return good_options(folder, script) | TEN | drawn


def stepped(model):
    """Return a model, and its optimizer after an update."""
    optimizer = ppo_sync.make_optimizer(model, ppo_sync.Args())
    optimizer.step()
    return model, optimizer


def save_run(folder, script):
    """Write a run that was interrupted in step 8, with checkpoints after steps 3 and 6."""
    module = importlib.import_module(Path(script).stem)
    args = tyro.cli(module.Args, args=words_of(options_of_run(folder, script)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    if script in TRAINER:
        args.mini_batch_size, args.num_updates, args.stop_token_id = 8, 8, 1
        rows = module.load_pairs(None, args.dataset, None, None, tokenizer, args)
    else:
        args = module.fill_in(args, 1)
        args.stop_token_ids = (1,)
        train, held_out = module.load_datasets(tokenizer, args)
        rows = train + held_out
    run_dir = folder / "output" / "run"
    write_text(run_dir / "args.json", json.dumps(asdict(args), indent=2))
    _, state = module.read_state(run_dir, None, rows, args)
    for step in (3, 6):
        write_text(run_dir / "metrics.jsonl", '{"training_step": 7}\n')
        (run_dir / "checkpoints/unfinished").mkdir(parents=True)
        ppo_sync.save_checkpoint({}, run_dir, step, state, args)


def cut_state(run_dir):
    (run_dir / "checkpoints/step_3/state.json").write_text('{"seconds": 1')


SAVED_BY_GRPO = in_json("args.json", lambda saved: saved.pop("gamma"))
HALVES = {"local_rollout_batch_size": 32, "local_mini_batch_size": 32, "num_processes": 2}
NEWER = "resumes | checkpoints/step_3 newer checkpoints will be removed: step_6"
# name: (options, words, scripts, what has happened to the run); step_3 is to be resumed. First
# what is refused
OTHER_RUNS = {
    "state cut off": ({}, "step_3 | damaged | older", EVERY, cut_state),
    "another script's": ({}, "another run | gamma was None", PPO, SAVED_BY_GRPO),
    "no checkpoint": ({"resume_from_checkpoint": "output/run"}, "no checkpoint | /step_1", EVERY),
    "seed": ({"seed": 2}, "seed was 1", EVERY),
    "other prompts": (prompts("8="), "the prompts have changed"),
    "other updates": ({"local_mini_batch_size": 16}, "mini_batch_size was 8", TRAINER),
}
NOTHING = {"resume_from_checkpoint": "latest", "run_name": "mine"}
RESUMED = {
    "none": (NOTHING, "resumes no checkpoint: | output/mine has none, so a new run", EVERY),
    "older": ({}, NEWER, EVERY),
    "rate": ({"learning_rate": 0.5}, "learning_rate was | and is now 0.5", EVERY),
    "half a batch on two ranks": (HALVES, "resumes | world_size was 1 and is now 2", PPO),
}
