import { defineConfig } from 'vite';
import react from '@vitejs/plugin-react';
export default defineConfig({ base: './', plugins: [react()], define: { 'process.env': {} }, build: { chunkSizeWarningLimit: 99999 } });
