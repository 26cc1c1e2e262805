"""Objects that write files, for torch.save() and scripts. They use Python's files."""

from .file_writers import FastFileWriter as FastFileWriter
from .file_writers import FastFileWriterConfig as FastFileWriterConfig
from .file_writers import MockFileWriter as MockFileWriter
from .file_writers import PyFileWriter as PyFileWriter
