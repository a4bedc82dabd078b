/* A softmax that goes on from block to block, over scores of which a row may see none: then its total
   is 0, its output 0 and its log-sum-exp -INFINITY. NaN stays NaN, so that broken KV is seen. */

#ifndef RAYBATCH_SOFTMAX_H
#define RAYBATCH_SOFTMAX_H

#include <math.h>

#include "exponential.h"

/* The share of what was seen before that is left once the highest score is a new one; before the first
   block nothing was seen, and its exponential would not be a number. */
static inline float kept_of(float total, float highest, float new_highest) {
    return total == 0.0f ? 0.0f : exp_of(highest - new_highest);
}

/* What a sum of weighted values is to be multiplied by at the end. */
static inline float share_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

static inline float log_sum_exp_of(float total, float highest) {
    return total == 0.0f ? -INFINITY : highest + logf(total);
}

#endif
