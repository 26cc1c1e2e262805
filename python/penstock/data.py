"""The public name of penstock.front.data."""

from penstock.front.data import ResumableLoader as ResumableLoader
