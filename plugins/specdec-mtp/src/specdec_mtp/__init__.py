"""Multi-token-prediction heads as drafters: the Qwen3.5 family, GLM and DeepSeek.

Gloeckle et al. 2024, *Better & Faster Large Language Models via Multi-token Prediction*,
arXiv 2404.19737; DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, section 2.2.
"""
