"""The processor API of ray.data.llm on raybatch's stages."""
