// The step of an optimizer on one parameter with a row for each label, as plain data, and the random bits of its rounding.
#pragma once

#include <cstdint>

namespace sk {

enum class UpdateKind : int { none = 0, sgd = 1, momentum = 2, adagrad = 3, adamw = 4 };
enum class Rounding : int { nearest = 0, stochastic = 1, kahan = 2 };  // of bfloat16

// "C" is the type of the arithmetic: float, or double where the parameter is double.
struct Update {
    UpdateKind kind = UpdateKind::none;
    Rounding rounding = Rounding::nearest;
    double lr = 0, weight_decay = 0;
    double momentum = 0;               // momentum
    double beta1 = 0, beta2 = 0;       // adamw
    double correction1 = 1, correction2 = 1;  // 1 - beta1^step, 1 - beta2^step
    double eps = 0;                    // adagrad, adamw
    uint64_t key = 0;                  // of the random bits: made from the seed, the step and the parameter
    void* parameter = nullptr;         // [m, columns], rows `stride` apart
    int64_t stride = 0;
    void* first = nullptr;             // C [m, columns]: momentum or mean of gradients; adagrad: sums of squares [m]
    void* second = nullptr;            // C [m, columns]: mean of squares
    void* compensation = nullptr;      // bfloat16 [m, columns], kahan
};

// Counter-based random bits: those of (key, label, column) are the same wherever and by whomever they are made.
inline uint32_t mix_bits(uint32_t x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

struct RandomRow {
    uint32_t start, middle;

    RandomRow(uint64_t key, int64_t label) {
        const uint64_t at = static_cast<uint64_t>(label);
        const uint32_t folded = static_cast<uint32_t>(at) ^ static_cast<uint32_t>(at >> 32) * 0x85ebca6bu;
        start = mix_bits(folded ^ static_cast<uint32_t>(key));
        middle = mix_bits(folded + static_cast<uint32_t>(key >> 32));
    }

    inline __attribute__((always_inline)) uint32_t bits(uint32_t column) const {
        uint32_t x = start + column * 0x9e3779b9u;
        x = ((x ^ x >> 16) * 0x21f0aaadu) ^ middle;
        x = (x ^ x >> 15) * 0xd35a2d97u;
        return x ^ x >> 15;
    }
};

}  // namespace sk
