#pragma once
// Symbols are hidden by default; what users link against carries this mark.
#define PENSTOCK_API __attribute__((visibility("default")))
