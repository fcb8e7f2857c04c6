"""Passes as text: what parses, what is printed back, and where an error points."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cascade.compiler import options as options_module
from torch_cascade.compiler.option_values import written
from torch_cascade.compiler.options import Options, settings
from torch_cascade.compiler.pass_list import parse_passes
from torch_cascade.compiler.pass_registry import BUILT_IN
from torch_cascade.compiler.pass_text import PassSpec, PassTextError, read


def parsed(text):
    return ",".join(map(str, parse_passes(text)))


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("cascade", "cascade"),
        ("cascade,blend", "cascade,blend"),
        ("none", ""),
        (" cascade { levels = 2 } , blend { } ", "cascade{levels=2},blend"),
        (
            "cascade{levels=2},blend{ratio=0.15,check-layer=1}",
            "cascade{levels=2},blend{ratio=0.15,check-layers=1}",
        ),
        (
            "cascade{decide=always},blend{recompute-ratio=3/20,check_layers=1}",
            "cascade{decide=always},blend{ratio=0.15,check-layers=1}",
        ),
        ('blend{check-layers="1:0.5,2:0.15"}', 'blend{check-layers="1:0.5,2:0.15"}'),
        (
            "blend{min_tokens=4,selector=KV,ratio=1/3}",
            "blend{ratio=1/3,selector=kv,min-tokens=4}",
        ),
    ],
)
def test_what_parses_and_how_it_is_printed(text, printed):
    assert parsed(text) == printed
    assert not printed or parsed(printed) == printed


def test_lists_of_texts_and_values_parse_alike():
    text = "cascade{levels=3},blend{ratio=0}"
    assert parse_passes(text.split(",")) == parse_passes(text)
    assert parse_passes(parse_passes(text)) == parse_passes(text)
    assert parse_passes([]) == ()


ratios = st.fractions(0, 1, max_denominator=1000)
layers = st.one_of(
    st.integers(0, 99).map(lambda n: ((n, None),)),
    st.dictionaries(st.integers(0, 99), ratios, min_size=1, max_size=4).map(
        lambda found: tuple(zip(sorted(found), sorted(found.values(), reverse=True), strict=True))
    ),
)
OPTIONS = {
    "cascade": {
        "levels": st.integers(2, 99),
        "decide": st.sampled_from(["auto", "always", "never"]),
        "guards": st.sampled_from(["auto", "never"]),
    },
    "blend": {
        "ratio": ratios,
        "check-layers": layers,
        "selector": st.sampled_from(["v", "k", "kv", "heads", "random", "attention", "change"]),
        "min-tokens": st.integers(0, 10**6),
        "decide": st.sampled_from(["auto", "always", "never"]),
        "guards": st.sampled_from(["auto", "never"]),
    },
}


@st.composite
def pipelines(draw):
    names = [name for name in OPTIONS if draw(st.booleans())] or ["cascade"]
    return tuple(
        PassSpec(
            name,
            tuple((o, draw(values)) for o, values in OPTIONS[name].items() if draw(st.booleans())),
        )
        for name in names
    )


@given(pipelines())
def test_what_is_printed_parses_to_the_same(specs):
    assert parse_passes(",".join(map(str, specs))) == specs
    assert written(specs) == written(parse_passes(written(specs)))


@given(st.text(alphabet='ab-_={},"\\ 12', max_size=30))
def test_any_text_parses_or_points_at_a_place_in_it(text):
    try:
        read(text)
    except PassTextError as error:
        what, line, caret = str(error).splitlines()
        assert what and 0 <= caret.index("^") - 4 <= len(text) and line.startswith("    ")


@given(st.text(alphabet='ab{},"\\= ', max_size=20))
def test_any_string_survives_as_a_value(text):
    ((_, value),) = read(str(PassSpec("some-pass", (("path", text),))))[0].options
    assert value.text == text


ERRORS = [
    ("cascad", "unknown pass 'cascad'; did you mean cascade? valid names are cascade, blend", 1),
    ("cascade,mix", "unknown pass 'mix'; valid names are cascade, blend", 9),
    (
        "blend{ration=1}",
        "unknown option 'ration' of pass 'blend'; did you mean ratio? valid names are ratio, ",
        7,
    ),
    ("cascade{ratio=1}", "unknown option 'ratio' of pass 'cascade'; valid names are levels", 9),
    ("blend{ratio=2}", "option 'ratio' of pass 'blend': expected a number from 0 to 1", 13),
    ("cascade{levels=1}", "expected a whole number, 2 or more", 16),
    ("cascade{levels=2,levels=3}", "option 'levels' is said twice", 18),
    ("blend{ratio=.1,recompute-ratio=.1}", "option 'ratio' is said twice", 16),
    ("cascade{levels}", "expected '=' and a value after the option 'levels'", 15),
    ("cascade{levels=}", "expected a value", 16),
    ("cascade{levels=2", "expected ',' or '}' after the value of an option", 17),
    ("cascade{=2}", "expected the name of an option", 9),
    ("cascade,", "expected the name of a pass", 9),
    ("cascade blend", "expected ',' between passes", 9),
    ("cascade}", "expected ',' between passes", 8),
    ('blend{check-layers="1:1}', "the quotation is never closed", 20),
]


@pytest.mark.parametrize(("text", "what", "column"), ERRORS)
def test_errors_say_where_and_what_would_do(text, what, column):
    with pytest.raises(ValueError) as caught:
        Options.resolve({"passes": text})
    first, line, caret = str(caught.value).splitlines()
    assert first.startswith("option 'passes': ") and what in first
    assert line == f"    {text}"
    assert caret == f"    {' ' * (column - 1)}^ column {column}"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("blend,cascade", "expected blend after cascade: it computes attention for some of the"),
        ("cascade,cascade", "expected each pass once, 'cascade' is there twice"),
        ("", "expected passes such as"),
        ([3], "expected passes such as"),
    ],
)
def test_orders_and_values_that_are_refused(value, what):
    with pytest.raises(ValueError, match=what):
        Options.resolve({"passes": value})


def test_the_variable_takes_the_same_text(monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_PASSES", "cascade{levels=2},blend{ratio=0.15,check-layer=1}")
    chosen, _ = Options.resolve()
    assert chosen.of_pass("cascade").levels == 2 and chosen.levels is None
    assert chosen.of_pass("blend").stages() == ((1, Fraction("0.15")),)
    monkeypatch.setenv("TORCH_CASCADE_PASSES", "cascade{levls=2}")
    with pytest.raises(ValueError, match="variable TORCH_CASCADE_PASSES: unknown option 'levls'"):
        Options.resolve()


def test_braces_are_about_one_pass_only():
    chosen, _ = Options.resolve({"passes": "cascade{decide=always},blend{ratio=1}"})
    assert chosen.of_pass("cascade").decide == "always"
    assert chosen.of_pass("blend").decide == chosen.of_pass("lower").decide == "auto"
    assert (chosen.recompute_ratio, chosen.of_pass("blend").recompute_ratio) == (
        Fraction("0.15"),
        1,
    )


def test_braces_beat_an_option_given_in_another_place(monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_DECIDE", "never")
    chosen, _ = Options.resolve({"passes": "cascade{decide=always},blend"})
    assert chosen.of_pass("cascade").decide == "always"
    assert chosen.of_pass("blend").decide == "never"
    monkeypatch.setenv("TORCH_CASCADE_DECIDE", "")
    monkeypatch.setenv("TORCH_CASCADE_PASSES", "cascade{decide=always}")
    chosen, _ = Options.resolve({"decide": "never"})
    assert chosen.of_pass("cascade").decide == "always"


def test_in_one_place_braces_and_option_must_agree(monkeypatch):
    text = "blend{ratio=0.2}"
    with pytest.raises(ValueError) as caught:
        Options.resolve({"passes": text, "recompute_ratio": 0.3})
    assert str(caught.value) == (
        "option 'passes' says blend{ratio=0.2} and option 'recompute_ratio' says 0.3: "
        "say one of them"
    )
    Options.resolve({"passes": text, "recompute_ratio": "1/5"})
    monkeypatch.setenv("TORCH_CASCADE_PASSES", text)
    monkeypatch.setenv("TORCH_CASCADE_RECOMPUTE_RATIO", "0.3")
    with pytest.raises(ValueError, match="the variable of 'passes' says blend"):
        Options.resolve()


def test_what_braces_say_is_in_the_cache_key():
    def key(text):
        return Options.resolve({"passes": text})[0].fingerprint()

    texts = ["cascade", "cascade{levels=2}", "cascade{levels=3}", "cascade,blend{ratio=0.2}"]
    assert len({*map(key, texts)}) == len(texts)
    assert key("cascade{levels=2}") == key(" cascade { levels = 2 }")


def test_the_options_of_our_passes_are_fields_of_options():
    fields = {f.name: f for f in options_module.dataclasses.fields(Options)}
    assert {s.name for s in settings()} == set(fields)
    for known in BUILT_IN.values():
        for option in known.options:
            field = fields[option.field]
            assert field.metadata["in_code"]
            default = getattr(Options(), option.field)
            text = None if default is None else written(default)
            assert option.parse(text) == field.metadata["parse"](text) == default
