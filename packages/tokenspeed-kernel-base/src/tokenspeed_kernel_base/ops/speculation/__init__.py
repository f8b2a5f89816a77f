"""Speculative decoding: draft trees and their verification by the target model."""
