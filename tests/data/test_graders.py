"""The rules that say whether an answer is right: the scripts' and scripts/rewards/graders.py's."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import graders
import pytest
from helpers import REPO

import ppo_vllm_async
from ppo_vllm_async import Args

# {(data source, ground truth): correct responses, and incorrect ones}
IN_THE_SCRIPTS = {
    ("openai/gsm8k", "72"): (["9 * 8 = 72\n#### 72", "#### 72.00 apples"], ["no number"]),
    ("my_gsm8k", "72"): (["#### 70\nNo. #### 72", "first 10, so 72"], ["first 72, then 62"]),
    ("openai/gsm8k", 72): (["The answer is 72."], ["72 is the answer #### 73"]),
    ("openai/gsm8k", "1,000"): (["#### 1000", "#### 1,000"], []),
    ("openai/gsm8k", "1234567.5"): (["#### $1,234,567.50."], []),
    ("openai/gsm8k", "-5"): (["#### -$5"], ["#### 5"]),
    ("openai/gsm8k", "0.5"): (["#### .5"], []),
    ("openai/gsm8k", "7"): (["#### 7 (7/1)", "10^2 and 7", "#### 7kg"], []),
    ("debug/sorting", "12358"): (["12358\n"], ["1235", "53812"]),
}
# What graders.py grades otherwise, because it reads a number as a whole or not at all, and compares
# it as what it is. The short rule in a script reads the number that a longer form begins with
OTHERWISE_IN_GRADERS = {
    ("openai/gsm8k", "9007199254740993"): (["#### 9007199254740993"], ["#### 9007199254740992"]),
    ("openai/gsm8k", "-7"): (["#### \u22127"], ["#### -7/2"]),
    ("openai/gsm8k", "7"): (["So it is 7. #### seven"], ["#### \u22127"]),
    ("openai/gsm8k", "1"): ([], ["#### 1/2", "#### 1{,}200", "#### 1 1/2"]),
    ("openai/gsm8k", "25"): ([], ["#### 2,5", "#### 25e3"]),
    ("openai/gsm8k", "12"): ([], ["#### 12:30", "#### 12-15", "#### 12^2", "#### 12**2"]),
}
MATH, HELLASWAG = "DigitalLearningGmbH/MATH-lighteval", "Rowan/hellaswag"
ENDINGS = (
    ["#### 2", "#### An ending is (2)", "It is 2. A man would.", "#### C", "#### 1? #### 2"],
    ["First 2, then 1", "#### 12", "B", ""],
)
IN_GRADERS = {
    (MATH, r"\frac12"): ([r"so it is \boxed{\frac{1}{2}}.", "The answer is 1/2", "$0.5$"], []),
    (MATH, r"50\%"): ([r"\boxed{0.5}", r"\boxed{50}"], [r"\boxed{5}"]),
    (MATH, "5"): ([r"$\boxed{5}$. So the final answer is 6."], []),
    (MATH, "6"): ([], [r"$\boxed{5}$. So the final answer is 6."]),
    (MATH, "10"): ([r"\boxed{9}, no: \boxed{10}"], [r"\boxed{10}, no: \boxed{9}"]),
    (MATH, "3"): ([], ["I do not know", r"\boxed{", r"\boxed{-3}"]),
    (HELLASWAG, "2"): ENDINGS,
    (HELLASWAG, 2): ENDINGS,
    ("gsm8k", "9"): (["<think>#### 8</think>9"], ["<think>9", "<think>9</think>"]),
    (HELLASWAG, "3"): (["Ending 1 is absurd. #### 3. Not 1"], []),
    (HELLASWAG, "0"): ([], ["A man walks in and sits down."]),  # "A" is an article
}
# What the box of a correct answer can hold, and that of an incorrect one. math-verify, which is
# pinned, compares them; each row is a kind of answer
BOXES = {
    "|x|": ([r"\left|x\right|"], ["x"]),
    "9007199254740993": (["9,007,199,254,740,993"], ["9007199254740992"]),  # not a float
    "x^2+2x+1": (["(x+1)^2"], ["x^2+2x"]),
    "y=2x+1": (["2x+1", "y = 1 + 2x"], ["y=2x-1"]),
    "[2,5)": ([r"\left[2,5\right)"], ["(2,5)", "[2,5]"]),
    r"\{1,2,3\}": ([r"\{3,2,1\}", "1,2,3"], [r"\{1,2,4\}"]),
    "(1,2)": ([r"\left(1, 2\right)"], ["(2,1)"]),
    r"90^\circ": (["90", r"90^{\circ}"], ["9"]),
    r"5\text{ cm}": (["5", r"5\mathrm{cm}"], ["50"]),
    r"\$18.90": (["18.9"], ["18", r"\$18.09"]),
}
IN_BOXES = {
    (MATH, truth): tuple([rf"So it is $\boxed{{{one}}}$." for one in ones] for ones in answers)
    for truth, answers in BOXES.items()
}
# Forms in which an answer counts, and forms in which it does not
WITH = [r"\fbox{%s}", r"\framebox {%s}", r"\boxed {%s} so \boxed{}", r"\boxed{%s} \fbox{\text{ }}"]
WITH += [r"\boxed{%s}$\boxed{\ldots}$", r"<think>\boxed{0}</think>\boxed{%s}<think>9"]
UNDECIDED = [r"<think>\boxed{%s}", r"\boxed{%s}</think>"]
FORMS = {
    truth: ([form % right for form in WITH], [form % right for form in UNDECIDED])
    for truth, right in (("4", "4"), ("1,2", "2,1"))
}
CHOICES = ["C. 5", r"\text{(C) } 5", r"\textbf{(C)}\ 5", "C: a cat", r"\mathrm{C}", "(C) I am"]
OTHERS = ["A. 5", "C. or D.", r"\text{(A) or (C)}", "C - 5", "D) C", "Cat. 5"]
FORMS["C"] = tuple([rf"So \boxed{{{box}}}" for box in boxes] for boxes in (CHOICES, OTHERS))
TRUTHS = (str, "**{}**".format, "`{}` ".format, lambda truth: json.dumps([truth]))
TRUTHS += (lambda truth: json.dumps(["77", truth]),)
# Names of sources, and who grades them
GRADED_BY = {
    "grade_gsm8k": "openai/gsm8k gsm8k my/GSM8K-hard",
    "grade_hellaswag": "Rowan/hellaswag hellaswag",
    "grade_math": "DigitalLearningGmbH/MATH-lighteval lighteval/MATH HuggingFaceH4/MATH-500 MATH "
    "math_dapo aime_2024 HuggingFaceH4/aime_2024 amc23 numina_olympiads math/own "
    "AI-MO/NuminaMath-1.5 "
    "BytedTsinghua-SIA/DAPO-Math-17k zwhe99/DeepMath-103K open-r1/OpenR1-Math-220k",
    "code_sandbox": "mbpp google-research-datasets/mbpp evalplus/mbppplus openai/openai_humaneval "
    "human_eval codecontests deepmind/code_contests codeparrot/apps apps codeforces taco BAAI/TACO "
    "livecodebench code code_stdio code/own train-code-leetcode-easy",
    "if_constraints": "ifeval google/IFEval allenai/IF_multi_constraints_upto5 instructions",
}
AROUND = (("re", ""), ("", "s"), ("x", "x"), ("the_", ""), ("a-", "-b"))
every_grader = pytest.mark.parametrize(
    "grader", [ppo_vllm_async, graders], ids=lambda module: module.__name__
)


def wrongly_graded(grader, table):
    return [
        (truth, response)
        for (source, truth), answers in table.items()
        for score, responses in zip((1.0, 0.0), answers, strict=True)
        for response in responses
        if grader.compute_score(source, response, truth) != score
    ]


@every_grader
def test_numbers_and_sorting(grader):
    assert wrongly_graded(grader, IN_THE_SCRIPTS) == []
    for truth in ("a dozen", "1/2", "", None):  # which no answer can equal
        with pytest.raises(ValueError, match=r"must be a number|could not convert"):
            grader.compute_score("openai/gsm8k", "", truth)
    with pytest.raises(NotImplementedError, match=r"(?i)no/such.*gsm8k.*math.*--reward_fn"):
        grader.compute_score("no/such", "1", "1")


def test_the_careful_rule_reads_whole_numbers_and_the_scripts_rule_their_beginning():
    """docs/rewards.md tells the two apart by these cases."""
    assert wrongly_graded(graders, OTHERWISE_IN_GRADERS) == []
    cases = sum(len(responses) for pair in OTHERWISE_IN_GRADERS.values() for responses in pair)
    # The right answer of the first row is right for both
    assert len(wrongly_graded(ppo_vllm_async, OTHERWISE_IN_GRADERS)) == cases - 1
    for truth in ("nan", "inf", "1e6"):
        with pytest.raises(ValueError, match="must be a number"):
            graders.compute_score("openai/gsm8k", "", truth)


def test_math_and_endings(monkeypatch):
    signal.setitimer(signal.ITIMER_PROF, 60)  # it ends the process; SIGALRM is math-verify's
    with monkeypatch.context() as patch:
        patch.setattr(graders, "MATH_SECONDS", 20)  # beside other work
        assert wrongly_graded(graders, IN_GRADERS | IN_BOXES) == []
        # Each answer in other forms, with what comes before or after it, and its truth in others
        forms = {
            (MATH, form(truth)): answers for truth, answers in FORMS.items() for form in TRUTHS
        }
        assert wrongly_graded(graders, forms) == []
    assert graders.grade_math(r"<think>\boxed{4}", "4") == 0.0
    for truth in ("", None, [], "[]", '["4", ""]', "$$"):
        with pytest.raises(ValueError, match="ground truth"):
            graders.grade_math("4", truth)
    # What takes for ever to compute is wrong, and no failure of the reward
    for endless in ("9^{9^{9}}", r"10^{10^{10}}\%"):
        assert graders.grade_math(rf"\boxed{{{endless}}}", "5") == 0.0
    signal.setitimer(signal.ITIMER_PROF, 0)
    assert Args().reward_timeout > 6 * graders.MATH_SECONDS  # which would make it a failure
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="threaded environment"):
        pool.submit(graders.grade_math, "5", "5").result()  # no silent 0


def test_source_says_who_grades_its_rows(monkeypatch):
    def grader(name):
        return lambda *given: (name, given[-2:])

    class Neighbour:
        def __init__(self, name):
            if name == "tulu3":
                raise RuntimeError("it needs what is not here")
            self.compute_score = grader(name)

    for name in ("grade_gsm8k", "grade_hellaswag", "grade_math"):
        monkeypatch.setattr(graders, name, grader(name))
    monkeypatch.setattr(graders.importlib, "import_module", Neighbour)
    for name, sources in GRADED_BY.items():
        for source in sources.split():
            assert graders.compute_score(source, "a", "b") == (name, ("a", "b")), source
    # No name is found in the middle of another word, nor at its beginning
    names = [name for names in graders.NAMES.values() for name in names.split()]
    others = {f"{start}{name.rstrip('*')}{end}" for name in names for start, end in AROUND}
    others |= {name + end for name in names if "*" not in name for end in ("-1", "_x")}
    known = {name.rstrip("*") for name in names} | {"code_stdio", "taco-verified"}
    for source in (None, "", "math-ai/essays", "claimed_facts", "code_of_conduct", *others - known):
        with pytest.raises(NotImplementedError, match="write a function"):
            graders.compute_score(source, "a", "b")
    page = (REPO / "docs/rewards.md").read_text().partition("\n\n**The text**")[0]
    assert {*re.findall(r"`([\w*-]+)`", page)} >= {*names}
    # Tulu 3's rows are called so as well; and where a file does not load, its rows are refused
    with pytest.raises(NotImplementedError, match="'ifeval' cannot be graded here: it needs"):
        graders.compute_score("ifeval", "a", '{"func_name": "validate_no_commas"}')


def test_constraints_of_both_kinds_are_graded():
    of_ifeval = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    of_tulu = {"func_name": "validate_no_commas", "N": None}
    for truth in (of_ifeval, of_tulu, json.dumps(of_ifeval), json.dumps(of_tulu)):
        scores = [graders.compute_score("ifeval", text, truth) for text in ("a b", "a, b", "")]
        assert scores == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'rhymes' is not one of"):
        graders.compute_score("ifeval", "a", '{"func_name": "rhymes"}')
