#include "penstock/group.h"
#include "src/base/text.h"

namespace penstock {

Position Position::of(std::string text) {
  Position position;
  position.what = std::make_shared<const std::string>(std::move(text));
  return position;
}

std::string Position::text() const {
  const std::string name = what ? *what : "";
  if (!lane) return name;
  return concat("step ", step, ", collective ", sequence, " of lane ", *lane, ", `", name, "`");
}

}  // namespace penstock
