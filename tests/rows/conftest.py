from tests.stages.conftest import _data_context, bos_model, chat_model, model  # noqa: F401
