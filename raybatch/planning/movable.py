"""Tables in types whose rows Arrow can pick in any order; the sink casts back to the source's."""

import pyarrow as pa


def as_movable(table: pa.Table) -> pa.Table:
    """Return the table with views of text and bytes as plain columns, also inside other types.

    Arrow has no kernel that picks rows of a view (pyarrow 26); Polars writes such columns.
    """
    schema = movable_schema(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def movable_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of tables that `as_movable` returns."""
    return pa.schema([_movable(field) for field in schema], schema.metadata)


def _movable(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_string_view(kind):
        return field.with_type(pa.large_string())
    if pa.types.is_binary_view(kind):
        return field.with_type(pa.large_binary())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_movable(child) for child in kind]))
    if pa.types.is_map(kind):
        key, item = _movable(kind.key_field), _movable(kind.item_field)
        return field.with_type(pa.map_(key, item, keys_sorted=kind.keys_sorted))
    if pa.types.is_fixed_size_list(kind):
        return field.with_type(pa.list_(_movable(kind.value_field), kind.list_size))
    if pa.types.is_large_list(kind):
        return field.with_type(pa.large_list(_movable(kind.value_field)))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_movable(kind.value_field)))
    return field
