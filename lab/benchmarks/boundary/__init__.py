"""The page boundary: who ends, yields, grows, is loaded or prefilled."""
