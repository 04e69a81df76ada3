"""What odd engines send must neither freeze the proxy nor pass for success."""

from __future__ import annotations

import pytest

from dyn_relay.formats.sglang.events import error_object
from dyn_relay.formats.sglang.wire import NotJson, read_fields, shield


@pytest.mark.parametrize("data", [b'{"text":"' + b'\\"' * 200_000, b'"' * 200_001, b'{"a":"' + b"\\" * 200_001])
def test_an_unterminated_string_is_read_once(data):
    """It ends: quadratic reading of 400 kB would take hours."""
    with pytest.raises(NotJson):
        read_fields(data + b"NaN")


def test_words_inside_strings_stay():
    data = b'{"a":"NaN \\" Infinity","b":NaN,"c":[-Infinity,"\\\\"]}'
    assert shield(data) == b'{"a":"NaN \\" Infinity","b":"\\u0000NaN","c":["\\u0000-Infinity","\\\\"]}'


@pytest.mark.parametrize("code", ["100", "0", "-1", "99999", "200", "302", "null"])
def test_a_code_that_is_no_error_is_a_500(code):
    assert error_object(b'{"message":"bad","code":%s}' % code.encode()).code == 500


@pytest.mark.parametrize("code", [400, 404, 429, 500, 503, 599])
def test_error_codes_stay(code):
    assert error_object(b'{"message":"bad","code":%d}' % code).code == code
