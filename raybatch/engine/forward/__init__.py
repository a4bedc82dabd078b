"""The forward pass: the decoder, its sequence coroutines, its graphs and the ops that it takes."""
