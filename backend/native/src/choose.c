/* What this processor can run, and which kernel serves which format. */
#include <math.h>

#include "native.h"

const float fl_fp4_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

const float fl_e8m0_values[256] = {
    0x1p-127f, 0x1p-126f, 0x1p-125f, 0x1p-124f, 0x1p-123f, 0x1p-122f, 0x1p-121f, 0x1p-120f, 0x1p-119f, 0x1p-118f,
    0x1p-117f, 0x1p-116f, 0x1p-115f, 0x1p-114f, 0x1p-113f, 0x1p-112f, 0x1p-111f, 0x1p-110f, 0x1p-109f, 0x1p-108f,
    0x1p-107f, 0x1p-106f, 0x1p-105f, 0x1p-104f, 0x1p-103f, 0x1p-102f, 0x1p-101f, 0x1p-100f, 0x1p-99f, 0x1p-98f,
    0x1p-97f, 0x1p-96f, 0x1p-95f, 0x1p-94f, 0x1p-93f, 0x1p-92f, 0x1p-91f, 0x1p-90f, 0x1p-89f, 0x1p-88f, 0x1p-87f,
    0x1p-86f, 0x1p-85f, 0x1p-84f, 0x1p-83f, 0x1p-82f, 0x1p-81f, 0x1p-80f, 0x1p-79f, 0x1p-78f, 0x1p-77f, 0x1p-76f,
    0x1p-75f, 0x1p-74f, 0x1p-73f, 0x1p-72f, 0x1p-71f, 0x1p-70f, 0x1p-69f, 0x1p-68f, 0x1p-67f, 0x1p-66f, 0x1p-65f,
    0x1p-64f, 0x1p-63f, 0x1p-62f, 0x1p-61f, 0x1p-60f, 0x1p-59f, 0x1p-58f, 0x1p-57f, 0x1p-56f, 0x1p-55f, 0x1p-54f,
    0x1p-53f, 0x1p-52f, 0x1p-51f, 0x1p-50f, 0x1p-49f, 0x1p-48f, 0x1p-47f, 0x1p-46f, 0x1p-45f, 0x1p-44f, 0x1p-43f,
    0x1p-42f, 0x1p-41f, 0x1p-40f, 0x1p-39f, 0x1p-38f, 0x1p-37f, 0x1p-36f, 0x1p-35f, 0x1p-34f, 0x1p-33f, 0x1p-32f,
    0x1p-31f, 0x1p-30f, 0x1p-29f, 0x1p-28f, 0x1p-27f, 0x1p-26f, 0x1p-25f, 0x1p-24f, 0x1p-23f, 0x1p-22f, 0x1p-21f,
    0x1p-20f, 0x1p-19f, 0x1p-18f, 0x1p-17f, 0x1p-16f, 0x1p-15f, 0x1p-14f, 0x1p-13f, 0x1p-12f, 0x1p-11f, 0x1p-10f,
    0x1p-9f, 0x1p-8f, 0x1p-7f, 0x1p-6f, 0x1p-5f, 0x1p-4f, 0x1p-3f, 0x1p-2f, 0x1p-1f, 0x1p0f, 0x1p1f, 0x1p2f, 0x1p3f,
    0x1p4f, 0x1p5f, 0x1p6f, 0x1p7f, 0x1p8f, 0x1p9f, 0x1p10f, 0x1p11f, 0x1p12f, 0x1p13f, 0x1p14f, 0x1p15f, 0x1p16f,
    0x1p17f, 0x1p18f, 0x1p19f, 0x1p20f, 0x1p21f, 0x1p22f, 0x1p23f, 0x1p24f, 0x1p25f, 0x1p26f, 0x1p27f, 0x1p28f,
    0x1p29f, 0x1p30f, 0x1p31f, 0x1p32f, 0x1p33f, 0x1p34f, 0x1p35f, 0x1p36f, 0x1p37f, 0x1p38f, 0x1p39f, 0x1p40f,
    0x1p41f, 0x1p42f, 0x1p43f, 0x1p44f, 0x1p45f, 0x1p46f, 0x1p47f, 0x1p48f, 0x1p49f, 0x1p50f, 0x1p51f, 0x1p52f,
    0x1p53f, 0x1p54f, 0x1p55f, 0x1p56f, 0x1p57f, 0x1p58f, 0x1p59f, 0x1p60f, 0x1p61f, 0x1p62f, 0x1p63f, 0x1p64f,
    0x1p65f, 0x1p66f, 0x1p67f, 0x1p68f, 0x1p69f, 0x1p70f, 0x1p71f, 0x1p72f, 0x1p73f, 0x1p74f, 0x1p75f, 0x1p76f,
    0x1p77f, 0x1p78f, 0x1p79f, 0x1p80f, 0x1p81f, 0x1p82f, 0x1p83f, 0x1p84f, 0x1p85f, 0x1p86f, 0x1p87f, 0x1p88f,
    0x1p89f, 0x1p90f, 0x1p91f, 0x1p92f, 0x1p93f, 0x1p94f, 0x1p95f, 0x1p96f, 0x1p97f, 0x1p98f, 0x1p99f, 0x1p100f,
    0x1p101f, 0x1p102f, 0x1p103f, 0x1p104f, 0x1p105f, 0x1p106f, 0x1p107f, 0x1p108f, 0x1p109f, 0x1p110f, 0x1p111f,
    0x1p112f, 0x1p113f, 0x1p114f, 0x1p115f, 0x1p116f, 0x1p117f, 0x1p118f, 0x1p119f, 0x1p120f, 0x1p121f, 0x1p122f,
    0x1p123f, 0x1p124f, 0x1p125f, 0x1p126f, 0x1p127f, NAN,
};

int fl_abi(void) { return FL_ABI; }

#if defined(__x86_64__)
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

int fl_isa_supported(int isa) {
    __builtin_cpu_init();
    int bf16 = has_avx512() && __builtin_cpu_supports("avx512bf16");
    int vnni = has_avx512() && __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case FL_SCALAR: return 1;
        case FL_AVX2: return has_avx2();
        case FL_AVX512: return has_avx512();
        case FL_AVX512_BF16: return bf16;
        case FL_AVX512_VNNI: return vnni;
        case FL_AVX512_ALL: return bf16 && vnni;
        case FL_AMX_BF16: return bf16 && vnni && fl_amx_ready();
        default: return 0;
    }
}

fl_choice fl_choose(int isa, int format, int bf16_inputs, int tokens, int unit) {
    int x_kind = format == FL_MXFP4 ? FL_X_MX : FL_X_F32;
#if defined(FL_AMX) || defined(FL_AMX_EMULATED)
    if (isa == FL_AMX_BF16 && format == FL_BF16 && bf16_inputs && tokens <= FL_TOKENS && unit % 32 == 0)
        return (fl_choice){fl_amx_rows, FL_X_PAIRS};
#endif
    (void)tokens, (void)unit;
    if (isa == FL_AMX_BF16) isa = FL_AVX512_ALL;
    int pairs = isa == FL_AVX512_BF16 || isa == FL_AVX512_ALL, vnni = isa == FL_AVX512_VNNI || isa == FL_AVX512_ALL;
    /* Pairs of bf16 pay where weights are unpacked anyway; else plain products are quicker (9 tokens: Emerald Rapids 1.2
     * times, Zen 5 1.5 times). */
    if (pairs && format == FL_MXFP4 && bf16_inputs) return (fl_choice){fl_avx512_mx_rows, FL_X_MX_BF16};
    if (vnni && format == FL_INT8) return (fl_choice){fl_avx512_vnni_rows, FL_X_I16};
    if (isa == FL_SCALAR) return (fl_choice){fl_scalar_kernels[format], x_kind};
    return (fl_choice){(isa == FL_AVX2 ? fl_avx2_kernels : fl_avx512_kernels)[format], x_kind};
}
#else
int fl_isa_supported(int isa) { return isa == FL_SCALAR; }

fl_choice fl_choose(int isa, int format, int bf16_inputs, int tokens, int unit) {
    (void)isa, (void)bf16_inputs, (void)tokens, (void)unit;
    return (fl_choice){fl_scalar_kernels[format], format == FL_MXFP4 ? FL_X_MX : FL_X_F32};
}
#endif
