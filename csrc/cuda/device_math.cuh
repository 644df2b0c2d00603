// The arithmetic of core/losses.h and core/confusion.h for one number.
#pragma once

#include "core/hd.h"
#include "platform.cuh"

namespace sk {

template <class T>
struct DeviceMath {
    using V = T;
    static SK_HD T splat(double v) { return static_cast<T>(v); }
    static SK_HD T abs(T v) { return fabs(v); }
    static SK_HD T exp_neg(T v) { return exp(v); }
    static SK_HD T log(T v) { return ::log(v); }
    static SK_HD T log1p(T v) { return ::log1p(v); }
    static SK_HD T lt_select(T a, T b, T yes, T no) { return a < b ? yes : no; }
};

}  // namespace sk
