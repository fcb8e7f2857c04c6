"""Options: precedence, parsing, what goes to Inductor, what is refused."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from torch_cascade.compiler.options import Options, settings, written
from torch_cascade.compiler.pass_text import PassSpec

# name: (option, its value; variable, its value)
EVERY = {
    "disable": (False, False, "1", True),
    "passes": ([], (), "cascade", (PassSpec("cascade"),)),
    "decide": ("always", "always", "never", "never"),
    "calibration": ("none", "none", "auto", "auto"),
    "guards": ("auto", "auto", "never", "never"),
    "batch_invariant": (True, True, "0", False),
    "levels": (2, 2, "3", 3),
    "recompute_ratio": (0.1, Fraction(1, 10), "3/20", Fraction(3, 20)),
    "check_layers": (
        {1: 0.5, 2: "0.25"},
        ((1, Fraction(1, 2)), (2, Fraction(1, 4))),
        "2",
        ((2, None),),
    ),
    "selector": (len, len, "KV", "kv"),
    "min_tokens": (0, 0, "12", 12),
    "strict": ("yes", True, "off", False),
    "verify": (1, True, "numeric", "numeric"),
    "dump": ("graphs", Path("graphs"), "elsewhere", Path("elsewhere")),
}


def test_defaults_without_options_or_variables():
    options, patches = Options.resolve(None, None)
    assert options == Options()
    assert [p.name for p in options.passes] == ["cascade", "blend", "linears"]
    assert options.dump is None
    assert patches == {}


def test_every_option_is_covered_here():
    assert [s.name for s in settings()] == list(EVERY)
    assert [s.variable for s in settings()] == [f"TORCH_CASCADE_{n.upper()}" for n in EVERY]
    assert all(s.meaning for s in settings())


@pytest.mark.parametrize("name", EVERY)
def test_an_explicit_option_beats_its_variable_beats_the_default(name, monkeypatch):
    given, from_option, text, from_variable = EVERY[name]
    assert getattr(Options.resolve({name: given})[0], name) == from_option
    monkeypatch.setenv(f"TORCH_CASCADE_{name.upper()}", text)
    assert getattr(Options.resolve()[0], name) == from_variable
    assert getattr(Options.resolve({name: given})[0], name) == from_option
    assert from_option != from_variable


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_variable_counts_as_unset(name, monkeypatch):
    monkeypatch.setenv(f"TORCH_CASCADE_{name.upper()}", "")
    assert Options.resolve()[0] == Options()


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        ({}, ((1, Fraction(3, 20)),)),
        ({"recompute_ratio": 0}, ((-1, 0),)),
        ({"check_layers": -1}, ((-1, 0),)),
        ({"check_layers": "-1:0"}, ((-1, 0),)),
        ({"check_layers": {1: 0}}, ((-1, 0),)),
        ({"check_layers": 3, "recompute_ratio": "0.3"}, ((3, Fraction(3, 10)),)),
        ({"check_layers": " 2:.2, 1:.5"}, ((1, Fraction(1, 2)), (2, Fraction(1, 5)))),
        ({"check_layers": {1: 0.5, 4: 0}}, ((1, Fraction(1, 2)), (4, 0))),
    ],
)
def test_where_tokens_are_chosen(given, stages):
    assert Options.resolve(given)[0].stages() == stages


def test_options_as_a_user_writes_them():
    chosen = {"check_layers": {1: 0.5, 2: Fraction(1, 3)}, "recompute_ratio": 0, "selector": len}
    told = written(Options.resolve(chosen)[0])
    assert (told["check_layers"], told["selector"]) == ("1:0.5,2:1/3", "len")
    assert told["recompute_ratio"] == "0"
    again = {"check_layers": told["check_layers"]}
    assert Options.resolve(again)[0].check_layers == Options.resolve(chosen)[0].check_layers


def test_no_pass_at_all_has_a_word(monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_PASSES", "none")
    assert Options.resolve()[0].passes == ()
    assert Options.resolve({"passes": "cascade"})[0].passes == (PassSpec("cascade"),)
    assert written(Options(passes=()))["passes"] == "none"


@pytest.mark.parametrize("word", ["1", "true", "YES", " on ", True, 1])
def test_words_for_true(word, monkeypatch):
    assert Options.resolve({"strict": word})[0].strict is True
    monkeypatch.setenv("TORCH_CASCADE_STRICT", str(word))
    assert Options.resolve()[0].strict is True


@pytest.mark.parametrize("word", ["0", "false", "No", "off", False, 0])
def test_words_for_false(word, monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_STRICT", "1")
    assert Options.resolve({"strict": word})[0].strict is False


def test_an_unreadable_variable_is_an_error_even_where_the_option_is_given(monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_DECIDE", "fast")
    with pytest.raises(ValueError, match="variable TORCH_CASCADE_DECIDE: expected one of auto, al"):
        Options.resolve({"decide": "always"})


BAD = [
    ("strict", 2, "option 'strict': expected one of 0, 1, .* got 2"),
    ("strict", None, "got None"),
    ("strict", 1.0, "got 1.0"),
    ("decide", "fast", "option 'decide': expected one of auto, always, never, got 'fast'"),
    ("decide", True, "expected one of auto, always, never, got True"),
    ("guards", "always", "option 'guards': expected one of auto, never, got 'always'"),
    ("passes", "mix", "option 'passes': unknown pass 'mix'; valid names are cascade, blend"),
    ("levels", 1, "expected a whole number, 2 or more: .*, got 1"),
    ("verify", "all", "expected one of 0, 1, .*, or numeric, got 'all'"),
    (
        "recompute_ratio",
        "1.5",
        "option 'recompute_ratio': expected a number from 0 to 1.* got '1.5'",
    ),
    ("recompute_ratio", -0.1, "from 0 to 1"),
    ("recompute_ratio", "1/0", "from 0 to 1"),
    ("recompute_ratio", True, "got True"),
    ("recompute_ratio", float("nan"), "got nan"),
    ("check_layers", {1: 0.1, 2: 0.5}, "expected layers with ratios that do not rise"),
    ("check_layers", "1,2", "do not rise"),
    ("check_layers", "1:0.5,1:0.2", "do not rise"),
    ("check_layers", {-1: 0.15}, r"-1 \(full reuse\) only alone, with ratio 0"),
    ("check_layers", {-1: 0, 1: 0}, "only alone"),
    ("check_layers", {}, "got {}"),
    ("check_layers", -2, "got -2"),
    ("check_layers", [1], "got \\[1\\]"),
    ("check_layers", {1.5: 0.1}, "got {1.5: 0.1}"),
    ("min_tokens", -1, "expected a whole number, 0 or more, got -1"),
    ("min_tokens", 2.0, "got 2.0"),
    ("min_tokens", True, "got True"),
    (
        "selector",
        "x",
        "expected one of v, k, kv, heads, random, attention, change, question, or a callable",
    ),
    ("selector", 3, "got 3"),
    ("passes", "", "got ''"),
    ("passes", [["cascade"]], "option 'passes'"),
    ("passes", 3, "got 3"),
    ("dump", "", "option 'dump': expected the path of a folder, got ''"),
    ("dump", 3, "got 3"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_names_option_expected_and_actual(name, value, message):
    with pytest.raises(ValueError, match=message):
        Options.resolve({name: value})


def test_an_unknown_option_names_the_nearest_and_all_of_ours():
    with pytest.raises(ValueError) as error:
        Options.resolve({"decid": "always"})
    message = str(error.value)
    assert "unknown option 'decid'; did you mean decide" in message
    assert all(name in message for name in [*EVERY, "mode", "torch._inductor.list_options()"])


def test_the_nearest_names_include_those_of_inductor():
    with pytest.raises(ValueError, match=r"did you mean .*max_autotune"):
        Options.resolve({"max_autotun": True})


def test_an_option_that_resembles_nothing_still_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown option 'qqqq'; valid names are disable, "):
        Options.resolve({"qqqq": 1})


def test_an_unknown_variable_with_our_prefix_is_an_error(monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_STRICK", "1")
    with pytest.raises(ValueError, match="TORCH_CASCADE_STRICK; did you mean TORCH_CASCADE_STRICT"):
        Options.resolve()


def test_inductor_names_pass_through_with_dashes_or_underscores():
    given = {"max-autotune": True, "triton.cudagraphs": False, "strict": True}
    options, patches = Options.resolve(given)
    assert options.strict
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}
    assert given == {"max-autotune": True, "triton.cudagraphs": False, "strict": True}


@pytest.mark.parametrize("name", [s.name for s in settings()] + ["mode"])
def test_no_option_of_ours_hides_one_of_inductor(name):
    if name in torch._inductor.list_options():
        patches = Options.resolve({name: True})[1]
        assert patches == {name: True}, "the name is taken, so it must mean both"
        assert Options.resolve({name: False})[1] == {}


def test_batch_invariance_changes_code_and_is_asked_of_inductor_too(monkeypatch):
    assert Options(batch_invariant=True).fingerprint() != Options().fingerprint()
    monkeypatch.setenv("TORCH_CASCADE_BATCH_INVARIANT", "1")
    options, patches = Options.resolve(mode="max-autotune")
    assert options.batch_invariant and patches["max_autotune"]
    known = "batch_invariant" in torch._inductor.list_options()
    assert patches.get("batch_invariant", False) == known


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_inductor_values_are_type_checked_as_torch_does(value):
    with pytest.raises(ValueError, match="option 'max_autotune': expected bool, got"):
        Options.resolve({"max_autotune": value})
    with pytest.raises(RuntimeError, match="Unexpected type of attr max_autotune"):
        torch._TorchCompileInductorWrapper(None, {"max_autotune": value}, None)


@pytest.mark.parametrize(
    "name", ["fx_graph_remote_cache", "triton_kernel_default_layout_constraint"]
)
def test_union_and_parametrised_types_are_let_through(name):
    value = object()
    assert Options.resolve({name: value})[1] == {name: value}


@pytest.mark.parametrize("how", ["argument", "option", "both"])
def test_modes_become_patches(how):
    name = "max-autotune-no-cudagraphs"
    argument = name if how != "option" else None
    option = {"mode": name} if how != "argument" else {}
    _, patches = Options.resolve(option, argument)
    assert patches == torch._inductor.list_mode_options(name)
    assert "mode" not in patches


def test_default_and_empty_modes_patch_nothing():
    assert [Options.resolve(None, mode)[1] for mode in ("default", "", None)] == [{}, {}, {}]


def test_options_by_name_beat_the_mode():
    _, patches = Options.resolve({"triton.cudagraphs": False}, "reduce-overhead")
    assert patches == {"triton.cudagraphs": False}


def test_patches_are_a_copy_of_the_mode():
    Options.resolve(None, "reduce-overhead")[1]["triton.cudagraphs"] = "changed"
    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}


@pytest.mark.parametrize(
    ("option", "argument", "message"),
    [
        ("max-autotune", "reduce-overhead", "'mode' is 'max-autotune' but .*'reduce-overhead'"),
        ("fast", None, "mode: expected one of default, .*, got 'fast'"),
        (3, None, "option 'mode': expected a name, got 3"),
    ],
)
def test_bad_modes(option, argument, message):
    with pytest.raises(ValueError, match=message):
        Options.resolve({"mode": option}, argument)


def test_the_fingerprint_changes_with_what_changes_code_and_with_nothing_else():
    base = Options().fingerprint()
    assert Options(dump=Path("x"), verify=True, strict=True, disable=True).fingerprint() == base
    for other in (Options(decide="never"), Options(guards="never"), Options(passes=())):
        assert other.fingerprint() != base
