"""Names of types; `python -m scripts.record.type_names` writes this file."""

from typing import Literal

FileType = Literal[
    "F32", "F16", "BF16", "COPY", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q1_0", "Q2_0", "TQ1_0",
    "TQ2_0", "MXFP4_MOE", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S",
    "Q5_K_M", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS",
    "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS", "Q3_K", "Q4_K", "Q5_K", "Q6_0", "Q8_KV", "IQ1_KT", "IQ2_KT",
    "IQ3_KT", "IQ4_KT", "IQ2_KS", "IQ2_K", "IQ2_KL", "IQ3_KS", "IQ3_K", "IQ3_KL", "IQ4_KSS", "IQ4_KS",
    "IQ4_K", "IQ5_KS", "IQ5_K", "IQ6_K", "Q4_0_R8", "Q5_0_R4", "Q6_0_R4", "Q8_0_R8", "Q2_K_R4", "Q3_K_R4",
    "Q4_K_R4", "Q5_K_R4", "Q6_K_R4", "Q8_K_R8", "Q8_KV_R8", "IQ1_S_R4", "IQ1_M_R4", "IQ2_XXS_R4",
    "IQ2_XS_R4", "IQ2_M_R4", "IQ3_XXS_R4", "IQ3_S_R4", "IQ4_NL_R4", "IQ4_XS_R8", "IQ2_K_R4", "IQ3_K_R4",
    "IQ4_K_R4", "IQ5_K_R4", "IQ4_KS_R4", "IQ5_KS_R4", "BF16_R16"
]  # fmt: skip

TypeName = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0", "Q6_0", "Q8_KV", "IQ2_K", "IQ2_KS", "IQ2_KL",
    "IQ3_K", "IQ3_KS", "IQ4_K", "IQ4_KS", "IQ4_KSS", "IQ5_K", "IQ5_KS", "IQ6_K", "IQ1_KT", "IQ2_KT",
    "IQ3_KT", "IQ4_KT", "IQ1_S_R4", "IQ1_M_R4", "Q8_K_R8", "Q8_KV_R8", "Q4_0_R8", "Q5_0_R4", "Q6_0_R4",
    "Q8_0_R8", "Q2_K_R4", "Q3_K_R4", "Q4_K_R4", "Q5_K_R4", "Q6_K_R4", "IQ2_XXS_R4", "IQ2_XS_R4",
    "IQ2_S_R4", "IQ3_XXS_R4", "IQ3_S_R4", "IQ4_NL_R4", "IQ4_XS_R8", "IQ2_K_R4", "IQ3_K_R4", "IQ4_K_R4",
    "IQ5_K_R4", "IQ4_KS_R4", "IQ5_KS_R4", "BF16_R16"
]  # fmt: skip

OutType = Literal[
    "auto", "f32", "f16", "bf16", "q8_0"
]  # fmt: skip
