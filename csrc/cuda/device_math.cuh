// The arithmetic of core/losses.h for one float.
#pragma once

#include "core/hd.h"
#include "warp.cuh"

namespace sk {

constexpr float LOG2E = 1.4426950408889634f;

struct DeviceMath {
    using V = float;
    static SK_HD float splat(double v) { return static_cast<float>(v); }
    static SK_HD float abs(float v) { return fabsf(v); }
    static SK_HD float exp_neg(float v) { return expf(v); }
    static SK_HD float log(float v) { return logf(v); }
    static SK_HD float log1p(float v) { return log1pf(v); }
    static SK_HD float lt_select(float a, float b, float yes, float no) { return a < b ? yes : no; }
};

}  // namespace sk
