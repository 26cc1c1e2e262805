#pragma once
// Symbols are hidden by default; this macro exports the ones that programs link against.
#define PENSTOCK_API __attribute__((visibility("default")))
