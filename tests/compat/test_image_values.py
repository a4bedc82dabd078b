"""Images of PIL in what a user's function returns."""

import base64
from io import BytesIO

import pytest

from raybatch.compat.row_columns import json_text
from raybatch.rows.image_files import data_url, file_of, is_picture, plain
from tests.backends.image_models import png

Image = pytest.importorskip("PIL.Image", reason="PIL is not installed here")


@pytest.fixture
def picture():
    return Image.open(BytesIO(png(1)))


def test_a_picture_becomes_a_file_of_the_same_pixels(picture):
    assert is_picture(picture)
    assert Image.open(BytesIO(file_of(picture))).tobytes() == picture.tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_a_picture_in_colours_that_png_lacks_becomes_rgb(picture, mode):
    found = Image.open(BytesIO(file_of(picture.convert(mode))))
    assert (found.mode, found.size) == ("RGB", picture.size)


def test_pictures_at_any_depth_become_files(picture):
    found = plain({"image": [picture, b"x"], "n": 1})
    assert found == {"image": [file_of(picture), b"x"], "n": 1}


def test_in_json_a_picture_is_a_url(picture):
    url = f"data:image/png;base64,{base64.b64encode(file_of(picture)).decode()}"
    assert json_text(plain([{"image": picture}])) == f'[{{"image": "{url}"}}]'


def test_a_url_names_the_kind_of_a_file():
    assert data_url(b"\xff\xd8\xff\xe0").startswith("data:image/jpeg;base64,")
